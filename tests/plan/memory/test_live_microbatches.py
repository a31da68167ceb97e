"""What a rank holds when, against the published counts and against the simulator's own walk."""

from __future__ import annotations

import random

import pytest

from moefold.plan.memory.live_microbatches import (
    RankMoments,
    StageBytes,
    enough_microbatches,
    moments_by_rank,
    running_op,
    walk_rank_slots,
    walk_schedule,
)
from moefold.schedule.round_robin_schedules import backward_slot, forward_slot
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.simulate_program import simulate_program
from moefold.schedule.stage_costs import StageCosts

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb_h1", 1),
    ("zb_v", 2),
    ("dualpipe_v", 2),
]


def most(moments: RankMoments, load: StageBytes) -> float:
    return sum(moments.peak_moment(load).bytes_held(load))


def most_live(moments: RankMoments) -> int:
    return max(sum(moment.live) for moment in moments.moments)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 4), (8, 4), (16, 2)])
def test_live_chunks_of_interleaved_1f1b_and_one_more_where_passes_are_paired(pp: int, vpp: int):
    for pairs, more in (("none", 1), ("opposite", 2)):
        found = [most_live(moments) for moments in moments_by_rank("interleaved", pp, vpp, 4 * pp, pairs, False)]
        assert found == [2 * (pp - rank - 1) + (vpp - 1) * pp + more for rank in range(pp)]


@pytest.mark.parametrize(("schedule", "vpp"), CASES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_two_microbatches_in_step_are_live_where_one_would_be(schedule: str, vpp: int, pp: int):
    for microbatches in (2 * pp, 12 * pp, 42 * pp):
        alone = moments_by_rank(schedule, pp, vpp, microbatches // 2, "none", False)
        in_step = moments_by_rank(schedule, pp, vpp, microbatches, "alike", False)
        assert [most_live(moments) for moments in in_step] == [2 * most_live(moments) for moments in alone]


def test_the_published_example_has_19_17_15_and_13():
    by_rank = moments_by_rank("interleaved", 4, 4, 128, "none", False)
    assert [most_live(moments) for moments in by_rank] == [19, 17, 15, 13]


@pytest.mark.parametrize(("schedule", "vpp"), CASES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_a_few_microbatches_show_the_peak_of_many(schedule: str, vpp: int, pp: int):
    draw = random.Random(pp)
    for microbatches in (4 * pp, 5 * pp, 7 * pp, 11 * pp + 1, 40 * pp + pp - 1):
        load = StageBytes(*([draw.random() for _ in range(n * vpp)] for n in (1, 1, 3)))
        every = walk_schedule(schedule, pp, vpp, microbatches, "none", False)
        some = moments_by_rank(schedule, pp, vpp, microbatches, "none", False)
        assert enough_microbatches(schedule, pp, microbatches) <= max(
            5 * pp, microbatches if schedule == "gpipe" else 0
        )
        for whole, part in zip(every, some, strict=True):
            assert most(part, load) == pytest.approx(most(whole, load))


@pytest.mark.parametrize(("schedule", "vpp"), CASES)
def test_a_rank_holds_what_the_simulator_says(schedule: str, vpp: int):
    """Where a slot does both gradients, the simulator lets what waits stay until its end: it waits for nothing here."""
    pp, draw = 4, random.Random(7)
    stages = pp * vpp
    saved = [draw.random() for _ in range(stages)]
    held = [each * draw.random() for each in saved]
    nothing = dict.fromkeys("FDW", [1.0] * stages)
    program = build_program(schedule, pp, vpp, 12)
    expected = simulate_program(program, StageCosts(nothing, nothing, 0.0, saved, held)).bytes
    for rank, moments in enumerate(moments_by_rank(schedule, pp, vpp, 12, "none", False)):
        mine = SCHEDULES[schedule].stages_on_rank(rank, pp, vpp)
        kept, waiting = ([values[stage] for stage in mine] for values in (saved, held))
        assert most(moments, StageBytes(kept, waiting, [0.0] * 3 * vpp)) == pytest.approx(expected[rank])


def test_what_waits_is_counted_only_where_weight_gradients_come_later():
    classic = walk_rank_slots([forward_slot(0, 0), backward_slot(0, 0)], [0])
    assert max(row.waiting for row in classic.moments) == (0,)
    assert not classic.separate_wgrad
    data, weights = ((op,) for op in backward_slot(0, 0))
    apart = walk_rank_slots([forward_slot(0, 0), data, forward_slot(0, 1), weights], [0])
    assert max(row.waiting for row in apart.moments) == (1,)
    assert apart.separate_wgrad


def test_a_moment_says_what_runs_and_what_lives():
    (moments,) = moments_by_rank("1f1b", 1, 1, 3, "none", False)
    load = StageBytes([10.0], [0.0], [1.0, 5.0, 0.0])
    peak = moments.peak_moment(load)
    assert peak.bytes_held(load) == (10.0, 5.0)
    assert running_op(peak) == ("D", 0)
    assert peak.live == (1,)
