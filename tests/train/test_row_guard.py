"""Steps whose rows find no room on their rank: nothing is updated, and the step is run again as if it had run once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from moefold.layout.axes import World
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus
from moefold.train.step import compute_step, take_next_step
from tests.support.ranks import run_ranks

KEYS = [
    "--model.layers=1",
    "--data.seq_len=16",
    "--train.micro_batch=1",
    "--train.global_batch=2",
    "--model.moe.balance.bias_rate=0.001",
    "--observe.spike=6",
    "--parallel.ep=2",
]
SOME_ROOM = 1.6  # none for choices that are all pushed to one rank
PUSHES = (0.0, 9.0, -9.0)


class RunValues(NamedTuple):
    """What a run is after its steps."""

    reports: list[tuple[float, float, bool]]
    weights: torch.Tensor
    biases: torch.Tensor
    judged: list[torch.Tensor]
    counts: torch.Tensor


def assemble(world: World, *keys: str) -> Run:
    config = resolve_recipe("tiny", [*KEYS, *keys], world.size)
    return assemble_run(config, world, Path("."), random_corpus(config))


def weights_of(run: Run) -> torch.Tensor:
    run.parameters.await_all_buckets()
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def take_steps(world: World, *keys: str) -> RunValues:
    """Steps whose choices are pushed to the first rank, and away from it."""
    run = assemble(world, *keys)
    reports = []
    counts = torch.empty(0)
    for push in PUSHES:
        for load in run.model.loads():
            load.bias_E[:4] += push
        report = take_next_step(run)
        reports.append((report.loss, report.grad_norm, report.is_repeated))
        counts = report.loads.counts_LE
    biases = torch.cat([load.bias_E for load in run.model.loads()])
    states = [x for provider in run.further_state.values() for _, x in provider.named_state()]
    judged = [x for x in states if isinstance(x, torch.Tensor)]
    return RunValues(reports, weights_of(run), biases, judged, counts)


def overflow_alone(world: World) -> tuple[bool, bool]:
    """Whether a step that finds no room says so, and whether it leaves all weights."""
    run = assemble(world, "--parallel.dispatcher=symmetric", "--parallel.room=1.0")
    before = weights_of(run).clone()
    outputs = compute_step(run, run.loader.next_batch())
    assert outputs.overflowed is not None
    return bool(outputs.overflowed), torch.equal(before, weights_of(run))


def all_values(world: World):
    bounded = take_steps(world, "--parallel.dispatcher=symmetric", f"--parallel.room={SOME_ROOM}")
    return bounded, take_steps(world, "--parallel.dispatcher=dedup"), overflow_alone(world)


@cache
def on_two():
    return run_ranks(all_values, 2, ep=2)


def test_a_step_without_room_updates_nothing():
    assert [alone for _, _, alone in on_two()] == [(True, True)] * 2


def test_a_run_whose_steps_find_no_room_is_that_of_collectives_to_the_bit():
    for bounded, unbounded, _ in on_two():
        assert [repeated for *_, repeated in bounded.reports] == [False, True, False]
        assert [report[:2] for report in bounded.reports] == [report[:2] for report in unbounded.reports]
        for a, b in zip(bounded[1:3], unbounded[1:3], strict=True):
            assert torch.equal(a, b)
        assert torch.equal(bounded.counts, unbounded.counts)
        assert bounded.judged
        assert all(map(torch.equal, bounded.judged, unbounded.judged))
