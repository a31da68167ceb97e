"""Watching a step changes nothing of it, and accounts for all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.config.run import ParallelConfig
from moefold.layout.axes import World, single_rank_world
from moefold.observe.profile import StepPhase
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run, unobserved_phase
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step
from moefold.train.step_profile import WatchedStep, profile_step, profile_text, write_profile_trace
from tests.support.ranks import run_ranks


def small_run(folder: Path) -> Run:
    config = shrink_config(PRESETS["tiny"](), 1)
    return assemble_run(replace(config, name="small"), single_rank_world(), folder, random_corpus(config))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, WatchedStep, list[float]]:
    run = small_run(tmp_path_factory.mktemp("run"))
    first = train_step(run, run.loader.next_batch()).loss
    report, found = profile_step(run, lambda: train_step(run, run.loader.next_batch()))
    return run, found, [first, report.loss, train_step(run, run.loader.next_batch()).loss]


def test_losses_of_a_run_with_a_watched_step_are_those_of_one_without(watched: tuple, tmp_path: Path):
    run = small_run(tmp_path)
    assert watched[2] == [train_step(run, run.loader.next_batch()).loss for _ in range(3)]


def test_nothing_of_the_watching_is_left(watched: tuple):
    run = watched[0]
    assert run.executor.around == ()
    assert run.phase is unobserved_phase
    for owner, method in ((run.gradients, "begin"), (run.optimizer, "step"), (run.parameters, "publish")):
        assert method not in vars(owner)
    assert not any(module._forward_hooks for module in run.model.modules())


def test_every_step_has_its_time_forward_and_backward(watched: tuple):
    found = {(place.name, place.direction) for place in watched[1].profile.seconds_by_phase()}
    for name in ("embed", "attend", "route", "experts", "combine", "predict"):
        assert {(name, "forward"), (name, "backward")} <= found
    assert {("update", ""), ("norm", ""), ("balance", "")} <= found


def test_hardly_any_time_is_nobodys(watched: tuple):
    times = watched[1].profile.seconds_by_phase()
    nobody = sum(seconds for place, seconds in times.items() if place.name == "elsewhere")
    assert nobody < 0.25 * sum(times.values())


def test_products_have_the_flops_of_the_anatomy_and_a_time(watched: tuple):
    run, found, _ = watched
    names = [name for name, _, _ in found.products]
    assert names == ["attend", "attend core", "experts", "predict"]
    model, tokens = run.config.model, run.config.train.global_batch * run.config.data.seq_len
    experts = 3 * model.moe.ffn * model.hidden * model.moe.top_k * model.layers
    assert {name: flops for name, flops, _ in found.products}["experts"] == pytest.approx(6 * experts * tokens)
    assert all(seconds > 0 for *_, seconds in found.products)


def test_memory_is_counted_by_step_and_region_for_one_microbatch(watched: tuple):
    run, found, _ = watched
    tokens = run.config.train.micro_batch * run.config.data.seq_len
    row = tokens * run.config.model.hidden * 4  # one copy of the stream, in fp32
    saved = found.memory.saved
    assert {name.split()[0] for name in saved} <= {
        "embed",
        "attend",
        "route",
        "plan",
        "dispatch",
        "experts",
        "combine",
        "predict",
    }
    assert "attend core" in saved
    assert row * run.config.model.layers <= saved["attend core"] <= 8 * row * run.config.model.layers
    assert found.memory.resident["weights"] >= 4 * sum(p.numel() for p in run.model.parameters())


def test_the_text_and_the_trace_name_the_steps(watched: tuple):
    run, found, _ = watched
    text = profile_text(run, found)
    for word in ("attend", "add up gradients", "update", "attend core", "moments", "saved in experts activation"):
        assert word in text
    write_profile_trace(run, found)
    events = json.loads((run.out / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "steps"} <= lanes
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0.0


def watched_on_two_ranks(world: World, folder: Path) -> tuple[int, str]:
    config = shrink_config(PRESETS["tiny"](), world.size)
    run = assemble_run(config, world, folder, random_corpus(config))
    _, found = profile_step(run, lambda: train_step(run, run.loader.next_batch()))
    return len(run.parameters.under_way), profile_text(run, found)


def test_gathers_are_complete_when_the_profiler_stops_and_collectives_are_no_step(tmp_path: Path):
    for gathers, text in run_ranks(watched_on_two_ranks, 2, tmp_path):
        assert gathers == 0
        rows = {line.split()[1]: line.split("│") for line in text.splitlines() if line.count("│") == 7}
        assert rows["collectives"][-2].strip() == ""
        shares = [float(cells[-2].strip(" %")) for name, cells in rows.items() if name != "collectives"]
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
        assert float(rows["elsewhere"][-2].strip(" %")) < 25


def watched_with_shared_experts(world: World, folder: Path) -> tuple[set[StepPhase], set[str]]:
    start = PRESETS["tiny"]()
    model = replace(start.model, moe=replace(start.model.moe, shared_ffn=16))
    parallel = ParallelConfig(ep=2, dispatcher="all_to_all")
    config = shrink_config(replace(start, model=model, parallel=parallel), world.size)
    run = assemble_run(config, world, folder, random_corpus(config))
    _, found = profile_step(run, lambda: train_step(run, run.loader.next_batch()))
    return set(found.profile.seconds_by_phase()), set(found.memory.saved)


def test_steps_on_the_thread_of_the_comm_lane_are_watched_too(tmp_path: Path):
    for phases, saved in run_ranks(watched_with_shared_experts, 2, tmp_path, ep=2):
        for name in ("plan", "dispatch", "shared", "combine"):
            assert {StepPhase(name, "forward"), StepPhase(name, "backward")} <= phases
        assert {"plan", "dispatch dispatch", "shared"} <= saved  # dispatch: a step, and a region inside it
