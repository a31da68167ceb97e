"""Every token of a microbatch is held by exactly one rank, and each rank has the same work."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.kernels.routing.router_ops import sum_by_sequence
from moefold.layout.axes import Axis, World, single_rank_world
from moefold.model.token_layout import TokenShard, make_token_shard
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
degrees = st.sampled_from([1, 2, 3, 4, 8])


def shares(sequences: int, length: int, cp: int, tp: int = 1, first: int = 0) -> list[list[TokenShard]]:
    """[cp rank][tp rank]"""
    axes = [[Axis(name, tuple(range(n)), i) for i in range(n)] for name, n in (("cp", cp), ("tp", tp))]
    return [[TokenShard(sequences, length, c, t, CPU, first) for t in axes[1]] for c in axes[0]]


def lengths(cp: int, chunk: int) -> int:
    return chunk * (2 * cp if cp > 1 else 1)


def test_the_example_of_the_documentation():
    (one,), (two,) = shares(1, 8, 2)
    assert one.local_positions.tolist() == [0, 1, 6, 7]
    assert two.local_positions.tolist() == [2, 3, 4, 5]


@given(sequences=st.integers(1, 3), cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_what_ranks_hold_stands_in_the_order_of_the_sequence_and_back(sequences: int, cp: int, chunk: int):
    length = lengths(cp, chunk)
    x_BSN = torch.arange(sequences * length * 2).view(sequences, length, 2)
    ranks = [share for (share,) in shares(sequences, length, cp)]
    joined = torch.cat([x_BSN[:, share.local_positions].flatten(0, 1) for share in ranks])
    for share in ranks:
        first, second = share.in_sequence_order(joined, -joined)
        assert torch.equal(first, x_BSN)
        assert torch.equal(second, -x_BSN)
        assert torch.equal(share.in_rank_order(x_BSN), joined)


def test_after_a_swap_for_heads_a_rank_has_all_positions_and_its_share_of_the_heads():
    _, (two,) = shares(3, 8, 2)
    swapped = two.swapped_for_heads()
    assert swapped.local_positions.tolist() == list(range(8))
    assert swapped.positions_held(torch.zeros(3, 8)).shape == (3, 8)
    assert (swapped.head_axis.index, swapped.head_axis.size) == (1, 2)
    assert (two.head_axis.index, two.head_axis.size) == (0, 1)
    assert swapped.before_swap is two


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_the_positions_of_all_ranks_are_a_partition_of_the_sequence(cp: int, chunk: int):
    length = lengths(cp, chunk)
    held = [share.local_positions.tolist() for (share,) in shares(1, length, cp)]
    assert sorted(chain(*held)) == list(range(length))
    assert {len(positions) for positions in held} == {length // cp}
    assert all(positions == sorted(positions) for positions in held)


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_ordering_what_the_ranks_hold_gives_the_sequence_back(cp: int, chunk: int):
    length = lengths(cp, chunk)
    ranks = shares(1, length, cp)
    joined = torch.cat([share.local_positions for (share,) in ranks])
    for (share,) in ranks:
        assert torch.equal(joined[share.sequence_order], torch.arange(length))
        assert torch.equal(share.joined.flatten(), joined)


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_every_rank_has_as_many_pairs_of_query_and_key(cp: int, chunk: int):
    ranks = shares(1, lengths(cp, chunk), cp)
    assert len({(share.local_positions + 1).sum().item() for (share,) in ranks}) == 1


@given(sequences=st.integers(1, 5), cp=degrees, tp=degrees, chunk=st.integers(1, 3))
@settings(deadline=None, derandomize=True)
def test_every_token_is_on_one_rank_with_its_sequence(sequences: int, cp: int, tp: int, chunk: int):
    length = lengths(cp, chunk * tp)
    tokens_BS = torch.arange(sequences * length).view(sequences, length)
    found = []
    for row in shares(sequences, length, cp, tp):
        for share in row:
            of_context_C = share.slice_for_cp_rank(tokens_BS)
            mine_T = of_context_C.tensor_split(tp)[share.tp.index]
            assert torch.equal(share.sequence_index_T, mine_T // length)
            of_each_B = sum_by_sequence(mine_T[:, None], share.span)[:, 0].tolist()
            assert of_each_B == [int(mine_T[mine_T // length == b].sum()) for b in range(sequences)]
            found += mine_T.tolist()
    assert sorted(found) == list(range(sequences * length))


@given(sequences=st.integers(1, 5), first=st.integers(0, 9), cp=degrees, tp=degrees, chunk=st.integers(1, 3))
@settings(deadline=None, derandomize=True)
def test_a_token_has_the_same_number_on_any_layout_and_its_own_part_of_what_all_know(
    sequences: int, first: int, cp: int, tp: int, chunk: int
):
    length = lengths(cp, chunk * tp)
    numbers_BS = torch.arange(sequences * length).view(sequences, length) + first * length
    wide_BSN = torch.stack((numbers_BS, -numbers_BS), dim=-1)
    found = []
    for row in shares(sequences, length, cp, tp, first):
        for share in row:
            assert torch.equal(share.slice_for_rank(numbers_BS), share.token_number_T)
            assert torch.equal(
                share.slice_for_rank(wide_BSN), torch.stack((share.token_number_T, -share.token_number_T), dim=-1)
            )
            assert torch.equal(
                share.token_number_T, share.slice_for_cp_rank(numbers_BS).tensor_split(tp)[share.tp.index]
            )
            assert torch.equal(share.token_number_T // length - first, share.sequence_index_T)
            found += share.token_number_T.tolist()
    assert sorted(found) == list(range(first * length, (first + sequences) * length))


@given(sequences=st.integers(1, 5), cp=degrees, tp=degrees, chunk=st.integers(1, 3))
@settings(deadline=None, derandomize=True)
def test_places_go_by_position_first_and_then_by_sequence(sequences: int, cp: int, tp: int, chunk: int):
    length = lengths(cp, chunk * tp)
    for share in chain(*shares(sequences, length, cp, tp)):
        position, sequence = share.token_number_T % length, share.token_number_T // length
        assert torch.equal(share.position_rank_T, position * sequences + sequence)


def there_and_back(world: World) -> bool:
    """What every rank has for its own tokens is, gathered, what all know; on a microbatch that is not the first."""
    tokens_BS = torch.arange(3 * 16).view(3, 16)
    known_BSN = torch.stack((tokens_BS, tokens_BS.square()), dim=-1)
    share = make_token_shard(tokens_BS, world, 7)
    mine_T = share.slice_for_rank(known_BSN)
    assert len(mine_T) == 3 * 16 // world.size
    return torch.equal(share.gather_all_tokens(mine_T, world.axis("cp", "tp")), known_BSN)


def test_what_the_ranks_have_of_their_tokens_gathers_to_what_all_know():
    assert there_and_back(single_rank_world())
    for degrees in ({"cp": 2, "tp": 2}, {"cp": 4}, {"tp": 4}):
        assert run_ranks(there_and_back, 4, **degrees) == [True] * 4
