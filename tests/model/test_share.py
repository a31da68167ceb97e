"""Every token of a microbatch is held by exactly one rank, and each rank has the same work."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.layout.axes import Axis
from moefold.model.share import Share

CPU = torch.device("cpu")
degrees = st.sampled_from([1, 2, 3, 4, 8])


def shares(sequences: int, length: int, cp: int, tp: int = 1) -> list[list[Share]]:
    """[cp rank][tp rank]"""
    axes = [[Axis(name, tuple(range(n)), i) for i in range(n)] for name, n in (("cp", cp), ("tp", tp))]
    return [[Share(sequences, length, c, t, CPU) for t in axes[1]] for c in axes[0]]


def lengths(cp: int, chunk: int) -> int:
    return chunk * (2 * cp if cp > 1 else 1)


def test_the_example_of_the_documentation():
    (one,), (two,) = shares(1, 8, 2)
    assert one.positions.tolist() == [0, 1, 6, 7]
    assert two.positions.tolist() == [2, 3, 4, 5]


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_the_positions_of_all_ranks_are_a_partition_of_the_sequence(cp: int, chunk: int):
    length = lengths(cp, chunk)
    held = [share.positions.tolist() for (share,) in shares(1, length, cp)]
    assert sorted(chain(*held)) == list(range(length))
    assert {len(positions) for positions in held} == {length // cp}
    assert all(positions == sorted(positions) for positions in held)


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_ordering_what_the_ranks_hold_gives_the_sequence_back(cp: int, chunk: int):
    length = lengths(cp, chunk)
    ranks = shares(1, length, cp)
    joined = torch.cat([share.positions for (share,) in ranks])
    for (share,) in ranks:
        assert torch.equal(joined[share.ordered], torch.arange(length))
        assert torch.equal(share.joined.flatten(), joined)


@given(cp=degrees, chunk=st.integers(1, 6))
@settings(deadline=None, derandomize=True)
def test_every_rank_has_as_many_pairs_of_query_and_key(cp: int, chunk: int):
    ranks = shares(1, lengths(cp, chunk), cp)
    assert len({(share.positions + 1).sum().item() for (share,) in ranks}) == 1


@given(sequences=st.integers(1, 5), cp=degrees, tp=degrees, chunk=st.integers(1, 3))
@settings(deadline=None, derandomize=True)
def test_every_token_is_on_one_rank_with_its_sequence(sequences: int, cp: int, tp: int, chunk: int):
    length = lengths(cp, chunk * tp)
    tokens_BS = torch.arange(sequences * length).view(sequences, length)
    found = []
    for row in shares(sequences, length, cp, tp):
        for share in row:
            of_context_C = share.of_context(tokens_BS)
            mine_T = of_context_C.tensor_split(tp)[share.tp.index]
            assert torch.equal(share.sequence_T, mine_T // length)
            found += mine_T.tolist()
    assert sorted(found) == list(range(sequences * length))
