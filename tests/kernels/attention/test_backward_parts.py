"""Parts of attention's backward cover all scores once, in an order in which sums can go from one to the next, within
their memory."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import pytest

from moefold.kernels.attention import backward_parts, workspace
from moefold.kernels.attention.backward_parts import (
    MULTIPROCESSORS,
    BackwardPlan,
    Division,
    Programs,
    Scores,
    backward_workspace,
    even_shares,
    plan_backward,
    unit_rounds,
)

GIBIBYTES_4 = 4 << 30
SMALL_SHAPES = [(128, 1, 1), (700, 2, 3), (1500, 4, 2), (3000, 1, 8)]  # positions, units, group


@pytest.fixture(params=[1, 2, 5])
def ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Small plans: no sequence fits as a whole, keys in so many ranges."""

    def with_ranges(scores: Scores, units: int, group: int) -> Iterator[Division]:
        for units_at_once in even_shares(units):
            for heads in even_shares(group):
                yield Division(units_at_once, heads, request.param)

    monkeypatch.setattr(workspace, "MOST_BYTES", 0)
    monkeypatch.setattr(backward_parts, "divisions", with_ranges)
    plan_backward.cache_clear()
    yield request.param
    plan_backward.cache_clear()


def launches(plan: BackwardPlan, units: int):
    """Each launch with the units that it has."""
    for first, count in unit_rounds(units, plan.units):
        for part in plan.parts:
            yield range(first, first + count), part


def sees(t: int, n: int, causal: bool) -> bool:
    return not causal or t >= 2 * n


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("limit", [1_500_000, 4_000_000, 20_000_000])
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_parts_have_every_score_once_in_the_order_of_their_sums(
    shape: tuple[int, int, int], limit: int, causal: bool, ranges: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backward_parts, "PARTS_BYTES", limit)
    positions, units, group = shape
    plan = plan_backward(positions, units, group, 64, 64, causal)
    if plan is None:
        assert limit < 20_000_000
        return
    blocks = -(-positions // 128)
    tiles = 2 * blocks
    assert plan.workspace <= limit
    seen: set[tuple[int, int, int, int]] = set()
    next_block: dict[tuple[int, int, int], int] = {}  # of each query tile of a head
    for of_units, part in launches(plan, units):
        heads = range(part.head, part.head + part.heads)
        pairs = [(t, n) for t in range(part.top, part.end) for n in range(part.first, part.last) if sees(t, n, causal)]
        assert len(pairs) == Scores(tiles, causal, 64).tiles(part.top, part.end, part.first, part.last)
        assert len(of_units) * len(heads) * len(pairs) * 64 * 128 * 2 <= plan.score_bytes
        for unit in of_units:
            for head in heads:
                new = {(unit, head, t, n) for t, n in pairs}
                assert not seen & new
                seen |= new
                for t in range(part.top, part.end):
                    assert next_block.get((unit, head, t), 0) == part.first
                    next_block[unit, head, t] = part.last
                    assert sees(t, part.first, causal), "a launch's query sees some of its keys"
    wanted = sum(sees(t, n, causal) for t in range(tiles) for n in range(blocks))
    assert len(seen) == units * group * wanted


@pytest.mark.parametrize("heads", [(4, 8), (16, 1), (8, 4), (4, 16)], ids=str)
@pytest.mark.parametrize("thousands", [8, 32, 128, 320])
def test_four_gibibytes_are_enough_for_long_sequences(thousands: int, heads: tuple[int, int]):
    kv_heads, group = heads
    plan = plan_backward(thousands * 1024 - 1, kv_heads, group, 128, 128)
    assert plan
    if len(plan.parts) > 1:
        assert plan.workspace <= GIBIBYTES_4


@pytest.mark.parametrize("thousands", [8, 32, 128])
def test_one_sequence_of_32_query_and_4_key_heads_of_128_needs_at_most_four_gibibytes(thousands: int):
    assert 0 < backward_workspace(thousands * 1024, 1, 4, 8, 128, 128) <= GIBIBYTES_4


def test_a_sequence_without_room_for_128_queries_of_a_head_has_no_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backward_parts, "PARTS_BYTES", 1 << 20)
    assert plan_backward(131_072, 3, 2, 128, 128) is None
    assert backward_workspace(131_072, 3, 1, 2, 128, 128) == 0


def simulated(lengths: list[float]) -> float:
    """Until the last of these ends, the longest first, on so many multiprocessors."""
    ends = [0.0] * MULTIPROCESSORS
    for length in sorted(lengths, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


def test_a_predicted_duration_is_that_of_a_simulation_or_somewhat_less():
    draw = random.Random(0)
    for _ in range(200):
        longest = draw.uniform(10, 1000)
        levels = draw.randrange(0, 120)
        drop = draw.uniform(0, longest / max(levels, 1))
        programs = Programs(longest, draw.randrange(1, 1200), draw.randrange(1, 5), levels, drop)
        lengths = [programs.length(place) for place in range(programs.equal + programs.per_level * levels)]
        assert programs.length(len(lengths)) == 0
        assert programs.work == pytest.approx(sum(lengths))
        found = programs.duration() / simulated(lengths)
        assert 0.8 < found < 1.0001
