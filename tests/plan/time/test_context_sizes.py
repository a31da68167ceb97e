"""Static and dynamic context parallelism on the same samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moefold.bench.context import context_report, read_context_request
from moefold.bench.options import ContextOptions
from moefold.config.run import PipelineConfig
from moefold.data.dynamic_context import ContextMicrobatch, ContextShape
from moefold.plan.time.context_price import PlannedContextPrice, timed_lengths
from moefold.plan.time.context_sizes import LengthDistribution, static_plan
from moefold.plan.time.dynamic_step import step_seconds
from moefold.plan.time.simulate_step import ordered_program
from moefold.schedule.simulate_program import time_slots, uneven_makespan
from moefold.schedule.stage_costs import uniform_costs

ROOT = Path(__file__).parents[3]
OPTIONS = ContextOptions()


@pytest.fixture(scope="module")
def price() -> PlannedContextPrice:
    request = read_context_request(OPTIONS)
    return PlannedContextPrice(request.config, request.choices, request.gpu, OPTIONS.gpus, OPTIONS.limit)


def test_the_price_of_a_sequence_is_what_the_planner_says_of_it(price: PlannedContextPrice):
    for length, size in ((4096, 1), (8192, 1), (32768, 4), (131072, 16)):
        clock = price.clock(length, size)
        passes = [clock.time_stage(pieces) for pieces in price.pieces()]
        expected = sum(op.total for stage in passes for op in stage)
        tokens, attention, sending = price.of_sample(length, size)
        found = price.fixed + tokens + max(attention, sending)
        assert found == pytest.approx(expected, rel=0.03)


def test_lengths_are_timed_on_a_grid_that_holds_them():
    for length in range(1, 5000):
        below, above = timed_lengths(length)
        assert below <= max(length, 64)
        assert above >= length
        assert above <= 1.25 * below


def test_static_bins_hold_every_sample_once_on_the_ranks_of_the_longest(price: PlannedContextPrice):
    shape = ContextShape(16, 8192)
    lengths = LengthDistribution(2000, 1.4, 65536).draw(400_000, 1)
    for is_even in (False, True):
        plan = static_plan(lengths, shape, price, 65536, is_even)
        groups = [group for microbatch in plan.microbatches for group in microbatch.groups]
        assert sorted(number for group in groups for number in group.samples) == list(range(len(lengths)))
        assert {group.size for group in groups} == {8}
        assert all(sum(lengths[number] for number in group.samples) <= 65536 for group in groups)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_step_of_uneven_microbatches_is_simulated(stages: int):
    program = ordered_program(PipelineConfig(), stages, 6)
    costs = uniform_costs(stages)
    assert uneven_makespan(program, costs, [2.5] * 6) == pytest.approx(2.5 * time_slots(program, costs).makespan)
    seconds = [1.0, 2.0, 3.0, 9.0, 2.0, 1.0]
    microbatches = [ContextMicrobatch((), each) for each in seconds]
    found = step_seconds(microbatches, stages)
    assert found >= sum(seconds) / stages
    if stages == 1:
        assert found == pytest.approx(sum(seconds))
    else:
        assert found < step_seconds(sorted(microbatches, reverse=True), stages), "small ones first and last"


def test_the_schedule_of_uneven_microbatches_counts():
    microbatches = [ContextMicrobatch((), each) for each in (1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0)]
    plain, interleaved, deferred = (
        step_seconds(microbatches, 4, PipelineConfig(schedule, vpp))
        for schedule, vpp in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2))
    )
    assert deferred < plain
    assert interleaved != plain


def test_dynamic_sizes_reach_the_figures_of_the_page():
    report = context_report(OPTIONS)
    assert report["ratio"] >= 1.5
    page = (ROOT / "docs" / "long_context.md").read_text()
    for row in report["results"]:
        name = row["way"]
        figures = [f"{row['microbatches']:.1f}", f"{row['step_s']:.2f}", f"{row['pflop']:.2f}", f"{row['gb']:.0f}"]
        told = re.search(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)
        assert told, name
        cells = [cell.strip() for cell in told[1].split("|")]
        assert set(figures) <= set(cells), (name, figures)
