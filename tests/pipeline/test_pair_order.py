"""Weaving keeps every strand's order, loses nothing, and puts one's travel beside the other's work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.anatomy.step_specs import Lane, block_step_specs
from moefold.model.steps import Step
from moefold.pipeline.pair_order import StrandPiece, interleave_strands
from moefold.pipeline.passage import segments_for_pairing
from moefold.presets.zoo import PRESETS

pieces = st.builds(StrandPiece, st.sampled_from(["compute", "comm"]), st.sampled_from([0.5, 1.0, 2.0, 3.0]))
strands = st.lists(st.lists(pieces, max_size=12), max_size=3)


def clock(order: list[tuple[int, int]], woven: list[list[StrandPiece]]) -> dict[tuple[int, int], tuple[float, float]]:
    """When each piece runs if lanes take pieces in this order and a strand waits for its own last one."""
    free: dict[Lane, float] = {"compute": 0.0, "comm": 0.0}
    ended = [0.0] * len(woven)
    times = {}
    for s, i in order:
        piece = woven[s][i]
        begin = max(free[piece.lane], ended[s])
        free[piece.lane] = ended[s] = begin + piece.cost
        times[s, i] = (begin, begin + piece.cost)
    return times


def length(woven: list[list[StrandPiece]]) -> float:
    return max((end for _, end in clock(interleave_strands(woven), woven).values()), default=0.0)


@given(strands)
def test_nothing_is_lost_or_done_twice_and_every_strand_keeps_its_order(woven: list[list[StrandPiece]]):
    order = interleave_strands(woven)
    assert sorted(order) == [(s, i) for s, strand in enumerate(woven) for i in range(len(strand))]
    for s in range(len(woven)):
        assert [i for strand, i in order if strand == s] == list(range(len(woven[s])))


@given(strands)
def test_it_is_never_longer_than_one_strand_after_the_other(woven: list[list[StrandPiece]]):
    assert length(woven) <= sum(piece.cost for strand in woven for piece in strand)


@given(strands)
def test_it_is_never_shorter_than_a_strand_or_a_lane(woven: list[list[StrandPiece]]):
    lanes = [sum(p.cost for strand in woven for p in strand if p.lane == lane) for lane in ("compute", "comm")]
    alone = [sum(p.cost for p in strand) for strand in woven]
    assert length(woven) >= max([*lanes, *alone])


@given(strands)
def test_a_lane_waits_only_when_no_piece_of_it_could_begin(woven: list[list[StrandPiece]]):
    """Otherwise something that was ready earlier has been passed over."""
    order = interleave_strands(woven)
    times = clock(order, woven)
    starts = [times[each][0] for each in order]
    assert starts == sorted(starts), "pieces are begun in the order of time"


@given(strands)
def test_the_same_strands_are_woven_the_same_way_on_every_rank(woven: list[list[StrandPiece]]):
    assert interleave_strands(woven) == interleave_strands([list(strand) for strand in woven])


def layers(count: int, shared: int = 0, latent: int = 0) -> tuple[list[str], list[list[StrandPiece]]]:
    config = PRESETS["tiny"]().model
    model = replace(config, moe=replace(config.moe, shared_ffn=shared, latent=latent))
    steps = [Step(spec, lambda carry: carry) for _ in range(count) for spec in block_step_specs(model, 0)]
    segments = [[step.spec for step in segment] for segment in segments_for_pairing(steps)]
    forward = [StrandPiece(specs[0].lane) for specs in segments]
    return [specs[-1].name for specs in segments], [forward, forward[::-1]]


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


def test_one_strand_by_itself_is_run_as_it_is():
    strand = [StrandPiece("compute"), StrandPiece("comm"), StrandPiece("comm"), StrandPiece("compute")]
    assert interleave_strands([strand]) == [(0, i) for i in range(4)]
    assert all(i < j for (_, i), (_, j) in pairwise(interleave_strands([strand, []])))
    assert interleave_strands([]) == []


@given(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_of_pieces_that_can_begin_at_once_the_one_that_travels_is_begun_first(work: float, travel: float):
    """Work holds its caller until it is done: travel begun behind it would have nothing beside it."""
    assert interleave_strands([[StrandPiece("compute", work)], [StrandPiece("comm", travel)]])[0] == (1, 0)
    assert interleave_strands([[StrandPiece("comm", travel)], [StrandPiece("compute", work)]])[0] == (0, 0)
