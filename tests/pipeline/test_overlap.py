"""In a paired slot one microbatch's travel runs during the other's work; alone, during that of its shared experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from moefold.bench.overlap import slowed_all_to_all
from moefold.comm.lanes import THIS_LANE, Lanes, Ticket
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, single_rank_world
from moefold.observe.trace import SpanRecorder, TraceEvent
from moefold.pipeline.executor import Executor, LossWeights
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import one_segment
from moefold.pipeline.strand_runner import BackwardWork, ForwardWork, StrandWork
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import local_gradients, random_corpus, shrink_config
from moefold.train.step import train_step
from tests.support.ranks import run_ranks

ONE = LossWeights(torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64))
WIDE = 65536  # of shared experts that take much longer than to wake a thread
DELAY = 0.05  # seconds of an exchange; work of a step takes a few milliseconds


def config_of(pipeline: PipelineConfig, world: int, shared: int = 0, **parallel: Any) -> Config:
    start = PRESETS["tiny"]()
    moe = replace(start.model.moe, shared_ffn=shared)
    start = replace(start, model=replace(start.model, moe=moe), parallel=ParallelConfig(**parallel))
    small = shrink_config(replace(start, pipeline=pipeline), world)
    train = replace(small.train, precision="fp32", global_batch=4 * world // small.parallel.pp)
    return replace(small, train=train)


class Faces:
    """Holds up all travel until another piece of work begins, or somebody waits for it: which of the two comes first
    does not depend on the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moved = threading.Condition()
        self.begun = 0  # pieces of work
        self.awaited: set[int] = set()
        self.faced: dict[str, bool] = {}
        send, result = Lanes.send, Ticket.result
        owner = self

        def held_up(lanes: Lanes, work: Callable[[], Any], inputs: Any = None) -> Ticket:
            number, before = len(owner.faced), owner.begun
            name = f"{number} {type(work.args[0]).__name__}"  # pyright: ignore[reportFunctionMemberAccess]
            owner.faced[name] = False

            def later() -> Any:
                with owner.moved:
                    assert owner.moved.wait_for(lambda: owner.begun > before or number in owner.awaited, timeout=20)
                    owner.faced[name] = owner.begun > before
                return work()

            ticket = send(lanes, later, inputs)
            ticket.number = number  # pyright: ignore[reportAttributeAccessIssue]
            return ticket

        def noting(run: Callable[..., Any]) -> Callable[..., Any]:
            def begins(work: StrandWork, number: int, inputs: Any) -> Any:
                if work.pieces[number].lane == "compute":
                    with owner.moved:
                        owner.begun += 1
                        owner.moved.notify_all()
                return run(work, number, inputs)

            return begins

        def waits(ticket: Ticket) -> Any:
            with owner.moved:
                owner.awaited.add(ticket.number)  # pyright: ignore[reportAttributeAccessIssue]
                owner.moved.notify_all()
            return result(ticket)

        monkeypatch.setattr(Lanes, "send", held_up)
        for kind in (ForwardWork, BackwardWork):
            monkeypatch.setattr(kind, "run", noting(kind.run))
        monkeypatch.setattr(Ticket, "result", waits)


@pytest.mark.parametrize("shared", [0, 16], ids=["routed experts", "shared experts too"])
def test_all_travel_of_a_paired_slot_but_its_last_has_work_of_the_other_microbatch_beside_it(
    shared: int, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(PipelineConfig(pair=True, fill=False), 1, shared)
    faces = Faces(monkeypatch)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    train_step(run, run.loader.next_batch())
    slots, layers = 4 - 1, config.model.layers
    alone = 4 * layers  # dispatch and combine of the first forward and of the last backward, which are not paired
    assert len(faces.faced) == slots * 4 * layers + alone, "dispatch and combine of a forward and of a backward"
    uncovered = [name for name, faced in faces.faced.items() if not faced]
    without_work = alone // 2 if shared else alone
    assert len(uncovered) <= slots + without_work, f"waited for with nothing beside it: {uncovered}"


def test_all_travel_of_microbatches_in_step_but_the_last_has_work_of_the_other_beside_it(
    monkeypatch: pytest.MonkeyPatch,
):
    config = config_of(PipelineConfig(pair=True, pairs="alike", fill=False), 1)
    faces = Faces(monkeypatch)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    train_step(run, run.loader.next_batch())
    slots, layers = 4, config.model.layers  # two forwards or two backwards in each
    assert len(faces.faced) == slots * 4 * layers, "dispatch and combine of two passes"
    uncovered = [name for name, faced in faces.faced.items() if not faced]
    assert len(uncovered) <= slots, f"waited for with nothing beside it: {uncovered}"


PAUSE = 0.05  # seconds that a lane waits for the other, which may have nothing to do


class Meetings:
    """Lets backward pieces of both lanes run at the same time: an exchange begins inside of a piece of compute, and
    lasts until its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moved = threading.Condition()
        self.inside = {"compute": False, "comm": False}
        self.met = 0
        run, run_backward = BackwardWork.run, Passage.run_backward

        def begins(work: BackwardWork, number: int, inputs: Any) -> Any:
            if THIS_LANE.is_comm:
                self.wait_for("compute", True)
            return run(work, number, inputs)

        def meets(passage: Passage, number: int, gradients: Any) -> Any:
            lane, other = ("comm", "compute") if THIS_LANE.is_comm else ("compute", "comm")
            self.move(lane, True)
            if THIS_LANE.is_comm:
                self.wait_for(other, False)
            else:
                self.met += self.wait_for(other, True)
            try:
                return run_backward(passage, number, gradients)
            finally:
                self.move(lane, False)

        monkeypatch.setattr(BackwardWork, "run", begins)
        monkeypatch.setattr(Passage, "run_backward", meets)

    def move(self, lane: str, inside: bool) -> None:
        with self.moved:
            self.inside[lane] = inside
            self.moved.notify_all()

    def wait_for(self, lane: str, inside: bool) -> bool:
        with self.moved:
            return self.moved.wait_for(lambda: self.inside[lane] == inside, PAUSE)


def gradients_of_step(pipeline: PipelineConfig) -> dict[str, torch.Tensor]:
    """In fp64, whose sums are rounded: those of fp32 are in fp64 too."""
    config = config_of(pipeline, 1)
    config = replace(config, train=replace(config.train, precision="fp64"))
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    run.gradients.begin()
    run.executor.train(list(run.loader.next_batch().microbatches(1)), ONE)
    run.gradients.finish(torch.ones((), dtype=torch.float64))
    return {seen.what: seen.values for seen in local_gradients(run, "")}


@pytest.mark.parametrize("way", [{"defer": True}, {"schedule": "zb_h1"}], ids=str)
def test_weight_gradients_that_wait_are_added_in_the_order_of_microbatches_whatever_exchanges_run_beside_them(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    right = gradients_of_step(PipelineConfig())
    meetings = Meetings(monkeypatch)
    found = gradients_of_step(PipelineConfig(pair=True, pairs="alike", **way))
    assert meetings.met > 0
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


def overlap(a: TraceEvent, b: TraceEvent) -> float:
    return max(0.0, min(a.end, b.end) - max(a.start, b.start))


def traced(world: World, ways: list[PipelineConfig]) -> list[tuple[list[TraceEvent], int]]:
    """Events of a step of each way, with slow exchanges, and how many exchanges held up the compute lane."""
    found = []
    for way in ways:
        config = config_of(way, world.size, ep=2, dispatcher="all_to_all")
        run = assemble_run(config, world, Path("."), random_corpus(config))
        train_step(run, run.loader.next_batch())
        with slowed_all_to_all(DELAY) as exchanges:
            run.executor.spans.start_recording()
            train_step(run, run.loader.next_batch())
        found.append((list(run.executor.spans.events), count_held_up(exchanges)))
    return found


@pytest.mark.alone
def test_a_trace_shows_dispatch_and_combine_of_one_microbatch_during_the_others_work():
    ways = [PipelineConfig(), PipelineConfig(pair=True, fill=False), PipelineConfig(pair=True)]
    for alone_, paired, filled in run_ranks(traced, 2, ways, ep=2):
        assert not [e for e in alone_[0] if e.lane == "comm"], "unpaired, one lane does all"
        assert alone_[1] > 2 * paired[1], "paired, most exchanges do not hold up the compute lane"
        for events, _ in (paired, filled):
            work = [e for e in events if e.lane == "compute" and " " in e.name]
            comm = [e for e in events if e.lane == "comm"]
            assert {e.name.split()[0] for e in comm} == {"plan", "dispatch", "combine"}
            travel = [e for e in comm if not e.name.startswith("plan")]
            kinds = {e.name.split()[1][0] for e in travel}
            assert kinds == {"F", "D"}
            beside = []
            for each in travel:
                mine = each.name.split()[1]
                assert not [e for e in work if e.name.split()[1] == mine and overlap(e, each) > 0], (
                    "without shared experts a microbatch does not work while it travels"
                )
                if mine not in ("F0.0", "D0.3"):  # the first forward and the last backward are not paired
                    beside.append(any(overlap(e, each) > 0 for e in work))
            assert sum(beside) >= len(beside) / 2, f"{sum(beside)} of {len(beside)} have work beside them"
        fillers = [e for e in filled[0] if e.name == "weights"]
        travel = [e for e in filled[0] if e.lane == "comm"]
        assert fillers
        assert any(overlap(a, b) > 0 for a in fillers for b in travel), "weight gradients fill gaps"
        assert not [e for e in paired[0] if e.name == "weights"]


def count_held_up(exchanges: SpanRecorder) -> int:
    """All-to-alls that the compute lane ran itself."""
    return sum(event.lane == "compute" for event in exchanges.events)


# ---- shared experts beside the exchanges of their own microbatch ----


def shared_config(way: PipelineConfig, world: int, latent: int = 0, shared: int = 64) -> Config:
    config = config_of(way, world, ep=2, dispatcher="all_to_all")
    moe = replace(config.model.moe, latent=latent, shared_ffn=shared)
    return replace(config, model=replace(config.model, moe=moe))


TRIES = 3  # other processes of the machine can only take from what is hidden, so that a pass is as good as its best


def traced_shared(world: World) -> tuple[list[list[TraceEvent]], int]:
    """Events of each of a few steps with slow exchanges, and how many exchanges held up the compute lane."""
    config = shared_config(PipelineConfig(), world.size, shared=WIDE)
    run = assemble_run(config, world, Path("."), random_corpus(config))
    train_step(run, run.loader.next_batch())
    tries: list[list[TraceEvent]] = []
    with slowed_all_to_all(DELAY) as exchanges:
        for _ in range(TRIES):
            run.executor.spans.start_recording()
            train_step(run, run.loader.next_batch())
            tries.append(list(run.executor.spans.events))
    return tries, count_held_up(exchanges)


def hidden_shares(of_kind: list[TraceEvent]) -> tuple[list[float], set[str]]:
    """For each pass of shared experts the share of the shorter of the two, exchanges and shared experts, that is
    hidden; and which exchanges lie beside them."""
    beside: set[str] = set()
    hidden: list[float] = []
    for each in (e for e in of_kind if e.name.startswith("shared")):
        mine = [e for e in of_kind if e.lane == "comm" and e.name.split()[1] == each.name.split()[1]]
        beside |= {e.name.split()[0] for e in mine if overlap(each, e) > 0}
        longest = min(DELAY, each.end - each.start)
        hidden.append(sum(overlap(each, e) for e in mine) / longest)
    return hidden, beside


@pytest.mark.alone
def test_a_trace_shows_shared_experts_inside_the_travel_of_their_own_microbatch_without_pairs():
    config = shared_config(PipelineConfig(), 2, shared=WIDE)
    passes = 4 * config.model.layers  # four microbatches a rank
    for tries, held_up in run_ranks(traced_shared, 2, ep=2):
        assert held_up == 0, "no exchange runs on the compute lane"
        for kind in "FD":
            # Forward, a plan that waits for the other rank's counts may take as long as the shared experts: then
            # no dispatch lies beside them.
            own = {"plan", "dispatch"} if kind == "F" else {"combine"}
            shares = []
            for events in tries:
                of_kind = [e for e in events if " " in e.name and e.name.split()[1][0] == kind]
                hidden, beside = hidden_shares(of_kind)
                assert len(hidden) == passes
                assert beside, "shared experts have an exchange of their own microbatch beside them"
                assert beside <= own
                shares.append(hidden)
            best = [max(of_pass) for of_pass in zip(*shares, strict=True)]
            assert median(best) >= 0.8, f"{kind}: {median(best):.0%} of what can be hidden is hidden"


def gradients_both_ways(world: World, way: PipelineConfig, latent: int) -> list[tuple[list[Any], list[float]]]:
    """Gradients and losses of a step, with shared experts beside the exchanges and with all steps in line."""
    config = shared_config(way, world.size, latent)
    found = []
    overlapping = Executor.cut_steps
    for cut in (overlapping, lambda self, steps, is_paired: one_segment(steps)):
        Executor.cut_steps = cut  # type: ignore[method-assign]
        run = assemble_run(config, world, Path("."), random_corpus(config))
        run.gradients.begin()
        parts = list(run.loader.next_batch().microbatches(1))
        losses = run.executor.train(parts, ONE)
        run.gradients.finish(torch.ones((), dtype=torch.float64))
        found.append(([(s.what, s.values) for s in local_gradients(run, "")], losses.tolist()))
    Executor.cut_steps = overlapping  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("latent", [0, 16])
@pytest.mark.parametrize("way", [PipelineConfig(), PipelineConfig(defer=True)], ids=["plain", "deferred"])
def test_gradients_have_the_bits_of_those_of_steps_one_after_the_other(way: PipelineConfig, latent: int):
    for beside, in_line in run_ranks(gradients_both_ways, 2, way, latent, ep=2):
        assert beside[1] == in_line[1]
        assert len(beside[0]) == len(in_line[0]) > 10
        for (what, values), (_, right) in zip(beside[0], in_line[0], strict=True):
            assert torch.equal(values, right), what
