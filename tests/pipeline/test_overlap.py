"""In a paired slot one microbatch's travel runs during the other's work, and alone it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.bench.overlap import slowed_all_to_all
from moefold.comm.lanes import Lanes, Ticket
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, single_rank_world
from moefold.observe.trace import TraceEvent
from moefold.pipeline.pair_runner import PairRunner
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step
from tests.support.ranks import run_ranks

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
        send, begin, result = Lanes.send, PairRunner.begin, Ticket.result
        owner = self

        def held_up(lanes: Lanes, work: Callable[[], Any], inputs: Any = None) -> Ticket:
            number, before = len(owner.faced), owner.begun
            name = f"{number} {type(work.__self__).__name__}"  # pyright: ignore[reportFunctionMemberAccess]
            owner.faced[name] = False

            def later() -> Any:
                with owner.moved:
                    assert owner.moved.wait_for(lambda: owner.begun > before or number in owner.awaited, timeout=20)
                    owner.faced[name] = owner.begun > before
                return work()

            ticket = send(lanes, later, inputs)
            ticket.number = number  # pyright: ignore[reportAttributeAccessIssue]
            return ticket

        def noted(weaving: PairRunner, strand: int, lane: str, work: Callable[[], Any], inputs: Any) -> None:
            def begins() -> None:
                if lane == "compute":
                    with owner.moved:
                        owner.begun += 1
                        owner.moved.notify_all()
                work()

            begin(weaving, strand, lane, begins if lane == "compute" else work, inputs)

        def waits(ticket: Ticket) -> Any:
            with owner.moved:
                owner.awaited.add(ticket.number)  # pyright: ignore[reportAttributeAccessIssue]
                owner.moved.notify_all()
            return result(ticket)

        monkeypatch.setattr(Lanes, "send", held_up)
        monkeypatch.setattr(PairRunner, "begin", noted)
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
    assert len(faces.faced) == slots * 4 * layers, "dispatch and combine of a forward and of a backward"
    uncovered = [name for name, faced in faces.faced.items() if not faced]
    assert len(uncovered) <= slots, f"waited for with nothing beside it: {uncovered}"


def overlap(a: TraceEvent, b: TraceEvent) -> float:
    return max(0.0, min(a.end, b.end) - max(a.start, b.start))


def traced(world: World, ways: list[PipelineConfig]) -> list[tuple[list[TraceEvent], int]]:
    """Events of a step of each way, with slow exchanges, and how many exchanges held up the compute lane."""
    found = []
    for way in ways:
        config = config_of(way, world.size, ep=2, dispatcher="all_to_all")
        run = assemble_run(config, world, Path("."), random_corpus(config))
        train_step(run, run.loader.next_batch())
        with slowed_all_to_all(DELAY) as held_up:
            run.executor.spans.start_recording()
            train_step(run, run.loader.next_batch())
        found.append((list(run.executor.spans.events), len(held_up.events)))
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
                    "a microbatch does not work while it travels"
                )
                beside.append(any(overlap(e, each) > 0 for e in work))
            assert sum(beside) >= len(beside) / 2, f"{sum(beside)} of {len(beside)} have work beside them"
        fillers = [e for e in filled[0] if e.name == "weights"]
        travel = [e for e in filled[0] if e.lane == "comm"]
        assert fillers
        assert any(overlap(a, b) > 0 for a in fillers for b in travel), "weight gradients fill gaps"
        assert not [e for e in paired[0] if e.name == "weights"]
