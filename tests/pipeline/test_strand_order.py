"""Weaving keeps every strand's order, loses nothing, and puts one's travel beside the other's work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.anatomy.step_specs import Lane, block_step_specs
from moefold.model.moe.row_chunks import in_row_chunks
from moefold.model.steps import Step
from moefold.pipeline.segments import segments_for_pairing, segments_of_one_microbatch
from moefold.pipeline.strand_order import Strand, StrandPiece, backward_strand, interleave_strands, issue_order
from moefold.presets.zoo import PRESETS

Strands = tuple[Strand, ...]
Order = tuple[tuple[int, int], ...]


@st.composite
def graphs(draw: st.DrawFn) -> Strand:
    """Pieces that need any of those before them; a piece without needs among them may begin at once."""
    pieces: list[StrandPiece] = []
    for number in range(draw(st.integers(0, 10))):
        lane = draw(st.sampled_from(["compute", "comm"]))
        cost = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0]))
        needs = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        pieces.append(StrandPiece(lane, cost, tuple(needs)))
    return tuple(pieces)


strands = st.lists(graphs(), max_size=3).map(tuple)


def chain(*pieces: tuple[Lane, float]) -> Strand:
    """Pieces of which each needs the one before."""
    return tuple(StrandPiece(lane, cost, (i - 1,) if i else ()) for i, (lane, cost) in enumerate(pieces))


def clock(order: Order, woven: Strands) -> dict[tuple[int, int], tuple[float, float]]:
    """When each piece runs if lanes take pieces in this order and a piece waits for those that it needs."""
    free: dict[Lane, float] = {"compute": 0.0, "comm": 0.0}
    times: dict[tuple[int, int], tuple[float, float]] = {}
    for s, i in order:
        piece = woven[s][i]
        begin = max([free[piece.lane], *(times[s, need][1] for need in piece.needs)])
        free[piece.lane] = begin + piece.cost
        times[s, i] = (begin, begin + piece.cost)
    return times


def length(woven: Strands) -> float:
    return max((end for _, end in clock(interleave_strands(woven), woven).values()), default=0.0)


def longest_chain(strand: Strand) -> float:
    ends: list[float] = []
    for piece in strand:
        ends.append(piece.cost + max((ends[need] for need in piece.needs), default=0.0))
    return max(ends, default=0.0)


@given(strands)
def test_nothing_is_lost_or_done_twice_and_no_piece_begins_before_those_that_it_needs(woven: Strands):
    order = interleave_strands(woven)
    assert sorted(order) == [(s, i) for s, strand in enumerate(woven) for i in range(len(strand))]
    place = {key: number for number, key in enumerate(order)}
    for s, i in order:
        assert all(place[s, need] < place[s, i] for need in woven[s][i].needs)


@given(graphs())
def test_a_backward_needs_what_the_forward_was_needed_by_and_twice_turned_is_the_same(strand: Strand):
    turned = backward_strand(backward_strand(strand, 2.0), 0.5)
    assert [(p.lane, p.cost, set(p.needs)) for p in turned] == [(p.lane, p.cost, set(p.needs)) for p in strand]


@given(strands)
def test_it_is_never_longer_than_one_strand_after_the_other(woven: Strands):
    assert length(woven) <= sum(piece.cost for strand in woven for piece in strand)


@given(strands)
def test_it_is_never_shorter_than_a_strand_or_a_lane(woven: Strands):
    lanes = [sum(p.cost for strand in woven for p in strand if p.lane == lane) for lane in ("compute", "comm")]
    alone = [longest_chain(strand) for strand in woven]
    assert length(woven) >= max([*lanes, *alone])


@given(strands)
def test_a_lane_waits_only_when_no_piece_of_it_could_begin(woven: Strands):
    """Otherwise something that was ready earlier has been passed over."""
    order = interleave_strands(woven)
    times = clock(order, woven)
    starts = [times[each][0] for each in order]
    assert starts == sorted(starts), "pieces are begun in the order of time"


def copied(strand: Strand) -> Strand:
    return tuple(replace(piece) for piece in strand)


@given(strands)
def test_the_same_strands_are_woven_the_same_way_on_every_rank(woven: Strands):
    assert interleave_strands(woven) == interleave_strands(tuple(copied(strand) for strand in woven))


def layer_steps(count: int, shared: int = 0, latent: int = 0) -> list[Step]:
    config = PRESETS["tiny"]().model
    model = replace(config, moe=replace(config.moe, shared_ffn=shared, latent=latent))
    return [Step(spec, lambda carry: carry) for _ in range(count) for spec in block_step_specs(model, 0)]


def layers(count: int, shared: int = 0, latent: int = 0) -> tuple[list[str], Strands]:
    segments = segments_for_pairing(layer_steps(count, shared, latent))
    forward = tuple(StrandPiece(segment.lane, 1.0, segment.needs) for segment in segments)
    return [segment.steps[-1].spec.name for segment in segments], (forward, backward_strand(forward, 1.0))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("shared", "latent"), [(0, 0), (16, 0), (0, 16)])
def test_travel_of_one_microbatch_faces_work_of_the_other_in_every_moe_layer(count: int, shared: int, latent: int):
    """But for the last of all, behind which nothing is left, no travel passes without compute beside it."""
    _, woven = layers(count, shared, latent)
    times = clock(interleave_strands(woven), woven)
    busy = [(begin, end) for (s, i), (begin, end) in times.items() if woven[s][i].lane == "compute"]
    travel = [times[s, i] for s, strand in enumerate(woven) for i, piece in enumerate(strand) if piece.lane == "comm"]
    last = max(end for _, end in travel)
    for begin, end in travel:
        assert end == last or any(b < end and begin < e for b, e in busy), (begin, end)
    assert len(travel) == 4 * count


def test_one_layer_is_woven_as_it_is_drawn():
    names, woven = layers(1)
    backward = names[::-1]
    shown = [f"{(names, backward)[s][i]}.{'FB'[s]}" for s, i in interleave_strands(woven)]
    comm = [n for n in shown if n.startswith(("dispatch", "combine"))]
    compute = [n for n in shown if n not in comm]
    assert comm == ["combine.B", "dispatch.F", "dispatch.B", "combine.F"]
    assert compute == ["attend.F", "route.F", "experts.B", "experts.F", "route.B", "attend.B"]


def test_communication_of_equal_length_hides_wholly_but_at_the_ends():
    _, woven = layers(8)
    compute = sum(p.cost for strand in woven for p in strand if p.lane == "compute")
    assert length(woven) <= compute + 2


def test_one_chain_by_itself_is_run_as_it_is():
    strand = chain(("compute", 1.0), ("comm", 1.0), ("comm", 1.0), ("compute", 1.0))
    assert interleave_strands((strand,)) == tuple((0, i) for i in range(4))
    assert all(i < j for (_, i), (_, j) in pairwise(interleave_strands((strand, ()))))
    assert interleave_strands(()) == ()


@pytest.mark.parametrize("latent", [0, 16])
def test_shared_experts_run_beside_an_exchange_of_their_own_microbatch_forward_and_backward(latent: int):
    segments = segments_of_one_microbatch(layer_steps(2, shared=16, latent=latent))
    forward = tuple(StrandPiece(segment.lane, 1.0, segment.needs) for segment in segments)
    names = [" ".join(step.spec.name for step in segment.steps) for segment in segments]
    shared = [number for number, name in enumerate(names) if name == "shared"]
    assert len(shared) == 2
    for strand, at in ((forward, shared), (backward_strand(forward, 2.0), [len(names) - 1 - n for n in shared])):
        times = clock(interleave_strands((strand,)), (strand,))
        exchanges = [times[0, i] for i, piece in enumerate(strand) if piece.lane == "comm"]
        for number in at:
            begin, end = times[0, number]
            assert any(begin < e and b < end for b, e in exchanges), names


def test_without_shared_experts_or_where_a_policy_joins_the_layer_a_pass_of_one_microbatch_is_not_cut():
    assert len(segments_of_one_microbatch(layer_steps(2))) == 1


def test_costs_decide_which_microbatch_goes_first():
    """The one with a long exchange ahead, which the work of the other then runs beside."""
    work = chain(("compute", 1.0), ("compute", 1.0))
    travels = chain(("compute", 1.0), ("comm", 5.0))
    assert interleave_strands((work, travels))[0] == (1, 0)
    assert length((work, travels)) == 6.0
    as_if_even = interleave_strands((work, chain(("compute", 1.0), ("comm", 1.0))))
    assert max(end for _, end in clock(as_if_even, (work, travels)).values()) > 6.0


@given(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_of_pieces_that_can_begin_at_once_the_one_that_travels_is_begun_first(work: float, travel: float):
    """Work holds its caller until it is done: travel begun behind it would have nothing beside it."""
    computes, travels = chain(("compute", work)), chain(("comm", travel))
    assert interleave_strands((computes, travels))[0] == (1, 0)
    assert interleave_strands((travels, computes))[0] == (0, 0)


def exposed_share(strand: Strand) -> float:
    """Of the exchanges, what they add to the time of compute."""
    compute = sum(piece.cost for piece in strand if piece.lane == "compute")
    exchanges = sum(piece.cost for piece in strand if piece.lane == "comm")
    return (length((strand,)) - compute) / exchanges


@pytest.mark.parametrize(("shared", "chunks", "hidden"), [(0, 8, 0.7), (16, 2, 0.7), (16, 4, 0.8)])
def test_row_chunks_hide_most_of_a_layers_exchanges_where_its_compute_is_as_long(
    shared: int, chunks: int, hidden: float
):
    """Shared and routed experts compute as long as tokens are sent there and back: forward and backward."""
    config = PRESETS["tiny"]().model
    model = replace(config, moe=replace(config.moe, shared_ffn=shared))
    specs = block_step_specs(model, 0, chunks)[1:]
    steps = in_row_chunks([Step(spec, lambda carry: carry) for spec in specs], chunks)
    routed = 2.0 / chunks if not shared else 1.0 / chunks
    seconds = {"dispatch": 1.0 / chunks, "combine": 1.0 / chunks, "experts": routed, "shared": 1.0}
    segments = segments_of_one_microbatch(steps)
    pieces: list[StrandPiece] = []
    for segment in segments:
        cost = sum(seconds.get(step.spec.name, 0.0) for step in segment.steps)
        pieces.append(StrandPiece(segment.lane, cost, segment.needs))
    forward = tuple(pieces)
    assert exposed_share(forward) <= 1 - hidden
    assert exposed_share(backward_strand(forward, 1.0)) <= 1 - hidden


@given(strands)
def test_what_is_issued_early_keeps_the_order_of_each_lane_and_follows_the_compute_that_it_needs(woven: Strands):
    order, issued = interleave_strands(woven), issue_order(woven)
    place = {key: number for number, key in enumerate(issued)}
    for lane in ("compute", "comm"):
        assert [k for k in issued if woven[k[0]][k[1]].lane == lane] == [
            k for k in order if woven[k[0]][k[1]].lane == lane
        ]
    for s, i in issued:
        assert all(place[s, need] < place[s, i] for need in woven[s][i].needs)
    for (s, i), (t, j) in pairwise(issued):
        is_after_compute = woven[s][i].lane == "compute" and woven[t][j].lane == "comm"
        assert not is_after_compute or (s == t and i in woven[t][j].needs), "it could have been issued before"
