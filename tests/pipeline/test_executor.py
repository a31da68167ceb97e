"""The executor knows when a parameter has its last gradient, keeps nothing, and takes microbatches of any shape."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.anatomy.stage_contents import pipeline_program, pipeline_stages
from moefold.anatomy.step_specs import Lane
from moefold.comm.lanes import Lanes
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.data.loader import Batch
from moefold.layout.axes import World, single_rank_world
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.observe.trace import SpanRecorder
from moefold.pipeline.executor import LossWeights, StepRun
from moefold.pipeline.last_gradients import last_gradient_slots, may_defer_weight_grad
from moefold.pipeline.strand_order import Strand, StrandPiece
from moefold.pipeline.strand_runner import StrandRunner
from moefold.presets.zoo import PRESETS
from moefold.schedule.program import Program
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import sample_text, validation_loss
from moefold.train.parity import local_gradients, random_corpus, shrink_config
from moefold.train.step import train_step
from tests.pipeline.test_inbox import programs
from tests.support.ranks import run_ranks


def made(config: Config, world: World) -> Run:
    return assemble_run(config, world, Path("."), corpus=random_corpus(config))


def small(pipeline: PipelineConfig, world: int, name: str = "tiny", **parallel: int) -> Config:
    start = PRESETS[name]()
    start = replace(start, parallel=ParallelConfig(**parallel), train=replace(start.train, precision="fp64"))
    return shrink_config(replace(start, pipeline=pipeline), world)


@settings(deadline=None, max_examples=60)
@given(programs(), st.data())
def test_a_parameter_is_finished_in_the_slot_of_its_last_gradient_and_in_no_other(
    made: tuple[Program, list[int]], data: st.DataObject
):
    program, homes = made
    for rank, slots in enumerate(program):
        mine = [stage for stage, home in enumerate(homes) if home == rank]
        some = st.tuples(st.sets(st.sampled_from(mine), min_size=1), st.booleans())
        users = {f"p{i}": data.draw(some) for i in range(4)}
        found = last_gradient_slots(slots, users)
        for name, (stages, waits) in users.items():
            kinds = "DW" if waits else "D"
            uses = [n for n, slot in enumerate(slots) for op in slot if op.stage in stages and op.kind in kinds]
            assert [n for n, names in found.items() if name in names] == [max(uses)], name


def tiny_forms() -> list[str]:
    forms = {repr(replace(PRESETS[name](), name="")): name for name in PRESETS if name.endswith("-tiny")}
    return list(forms.values())


@pytest.mark.parametrize("name", tiny_forms())
def test_exactly_the_parameters_said_to_wait_get_their_gradient_with_w(name: str):
    """What came later than said would be added to a bucket that has left; what came earlier would leave late."""
    run = made(small(PipelineConfig(defer=True), 1, name), single_rank_world())
    batch = run.loader.next_batch()
    waiting: list[DeferredWork] = []
    run.gradients.begin()
    before = {name: view.clone() for name, view in gradient_views(run)}
    losses = run.model(batch.tokens_BS, batch.labels_BS)
    with deferring_weight_grads(waiting):
        (losses.cross_entropy + losses.ahead_M.sum() + losses.balance).backward()
    with_d = {name for name, view in gradient_views(run) if not torch.equal(view, before[name])}
    before = {name: view.clone() for name, view in gradient_views(run)}
    for work in waiting:
        work()
    with_w = {name for name, view in gradient_views(run) if not torch.equal(view, before[name])}
    assert not with_d & with_w
    assert with_w == {name for name in with_d | with_w if may_defer_weight_grad(name)}
    assert with_w


def gradient_views(run: Run) -> list[tuple[str, torch.Tensor]]:
    return [(p.name, view) for bucket in run.gradients.buckets for p, view in bucket.parameter_views(bucket.gradients)]


ONE = LossWeights(torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64))
WAYS = [
    PipelineConfig("1f1b", layout="Et|tL"),
    PipelineConfig("1f1b", 2, pair=True),
    PipelineConfig("zb_h1", 2),
    PipelineConfig("dualpipe_v", 2),
    PipelineConfig("zb_v", 2),
    PipelineConfig("gpipe", 3, defer=True),
]


def small_with_layout(pipeline: PipelineConfig, world: int, **parallel: int) -> Config:
    config = small(replace(pipeline, layout=""), world, **parallel)
    return replace(config, pipeline=pipeline)


def uneven_parts(run: Run) -> list[Batch]:
    """Microbatches of 2, 1 and 3 sequences, the last ones shorter."""
    whole = run.loader.batch_at(0, 6 * run.world.axis("dp").size)
    cuts, lengths = [(0, 2), (2, 3), (3, 6)], [8, 4, 6]
    return [
        Batch(whole.tokens_BS[a:b, :s], whole.labels_BS[a:b, :s], whole.first + a)
        for (a, b), s in zip(cuts, lengths, strict=True)
    ]


def run_uneven(world: World, ways: list[PipelineConfig]) -> list[tuple[list[Any], list[float], list[str]]]:
    found = []
    for way in ways:
        pp = world.axis("pp").size
        run = made(small_with_layout(way, world.size, pp=pp), world)
        run.gradients.begin()
        trips: list[StepRun] = []
        original = StepRun.run

        def noted(self: StepRun, original: Any = original, trips: list[StepRun] = trips) -> torch.Tensor:
            trips.append(self)
            return original(self)

        StepRun.run = noted  # type: ignore[method-assign]
        try:
            losses = run.executor.train(uneven_parts(run), ONE)
        finally:
            StepRun.run = original  # type: ignore[method-assign]
        run.gradients.finish(torch.ones((), dtype=torch.float64))
        (trip,) = trips
        places = ("local_cargo", "passages", "input_streams", "deferred_work")
        kept = [name for name in places if any(getattr(trip, name).values())]
        kept += ["inbox"] if trip.inbox.arriving or trip.inbox.sender else []
        kept += ["pipe"] if run.executor.pipe.pending_sends else []
        seen = [(s.what, s.values) for s in local_gradients(run, "")]
        found.append((seen, losses.tolist(), kept))
    return found


def test_microbatches_of_other_lengths_and_sizes_pass_and_nothing_is_kept_behind():
    by_rank = run_ranks(run_uneven, 2, WAYS, pp=2)
    for number, way in enumerate(WAYS):
        config = small_with_layout(way, 2, pp=2)
        alone_config = replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig())
        one = made(alone_config, single_rank_world())
        one.gradients.begin()
        losses = one.executor.train(uneven_parts(one), ONE)
        one.gradients.finish(torch.ones((), dtype=torch.float64))
        reference = {s.what: s.values for s in local_gradients(one, "")}
        names: set[str] = set()
        for seen, mine, kept in (rank[number] for rank in by_rank):
            assert not kept, f"{way}: {kept} not empty"
            for what, values in seen:
                assert torch.equal(values, reference[what]), f"{way}: {what}"
                names.add(what)
            assert mine in ([0.0], losses.tolist())
        assert names == set(reference), way


def evaluated(world: World, ways: list[PipelineConfig]) -> list[tuple[float, str]]:
    found = []
    for way in ways:
        config = small_with_layout(way, world.size, pp=world.axis("pp").size)
        train = replace(config.train, validate_sequences=5, micro_batch=2, global_batch=4, sample_tokens=3)
        run = made(replace(config, train=train), world)
        found.append((validation_loss(run), sample_text(run, "ab")))
        train_step(run, run.loader.next_batch())  # training goes on behind it
    return found


def test_validation_and_samples_are_those_of_one_rank_on_every_rank():
    """In microbatches of which the last is smaller."""
    by_rank = run_ranks(evaluated, 2, WAYS, pp=2)
    for number, way in enumerate(WAYS):
        layers = small_with_layout(way, 2, pp=2).model.layers
        config = small_with_layout(PipelineConfig(), 1)
        config = replace(config, model=replace(config.model, layers=layers))
        train = replace(config.train, validate_sequences=5, micro_batch=2, global_batch=4, sample_tokens=3)
        one = made(replace(config, train=train), single_rank_world())
        loss, text = validation_loss(one), sample_text(one, "ab")
        for rank in by_rank:
            assert rank[number][0] == pytest.approx(loss, rel=1e-12), way
            assert rank[number][1] == text, way


EARLY = [PipelineConfig("1f1b", 2), PipelineConfig("zb_h1", 2), PipelineConfig("zb_v", 2)]


def leaves_early(world: World) -> list[list[int]]:
    """For each way, how many buckets had left after each op, and how many there are."""
    found: list[list[int]] = []
    original = StepRun.run_unpaired_op
    for way in EARLY:
        run = made(small(way, world.size, pp=2), world)
        counts: list[int] = []

        def noted(self: StepRun, *args: Any, run: Run = run, counts: list[int] = counts) -> None:
            counts.append(len(run.gradients.reductions))
            original(self, *args)

        StepRun.run_unpaired_op = noted  # type: ignore[method-assign]
        try:
            run.gradients.begin()
            parts = list(run.loader.next_batch().microbatches(1))
            run.executor.train(parts, ONE)
        finally:
            StepRun.run_unpaired_op = original  # type: ignore[method-assign]
        found.append([*counts, len(run.gradients.reductions), len(run.gradients.buckets)])
        run.gradients.finish(torch.ones((), dtype=torch.float64))
    return found


def test_buckets_leave_with_their_last_gradient_and_not_before():
    """Whether it comes in one backward, or its weight gradients wait."""
    for rank in run_ranks(leaves_early, 2, pp=2):
        for way, counts in zip(EARLY, rank, strict=True):
            *during, after, buckets = counts
            assert after == buckets, f"{way}: all have left when the last op ends, before anybody asks"
            assert during[len(during) // 2] == 0, f"{way}: none while gradients are still to come"


def test_every_layer_of_the_program_is_held_by_the_rank_that_runs_it():
    for way in WAYS:
        config = small_with_layout(way, 2, pp=2)
        assert {op.stage for slots in pipeline_program(config, 3) for slot in slots for op in slot} == {
            stage.number for stage in pipeline_stages(config)
        }


# ---- strands on two lanes ----


@dataclass
class Calls:
    """A strand of plain functions."""

    pieces: Strand
    functions: Sequence[Callable[[], object]]

    def take_inputs(self, number: int) -> None:
        return None

    def run(self, number: int, inputs: None) -> object:
        return self.functions[number]()


def calls(*pieces: tuple[Lane, Callable[[], object]]) -> Calls:
    """A chain of functions, each on its lane."""
    strand = tuple(StrandPiece(lane, 1.0, (i - 1,) if i else ()) for i, (lane, _) in enumerate(pieces))
    return Calls(strand, [function for _, function in pieces])


def runner(fillers: list[DeferredWork]) -> tuple[StrandRunner, SpanRecorder]:
    spans = SpanRecorder(0, recording=True)
    return StrandRunner(Lanes(torch.device("cpu")), spans, fillers), spans


def test_work_of_a_strand_waits_for_its_own_travel_and_not_for_the_others():
    go, order = threading.Event(), []
    one = calls(
        ("comm", lambda: (go.wait(10), order.append("travel 0"))[1]),
        ("compute", lambda: order.append("work 0")),
    )
    other = calls(("compute", lambda: (order.append("work 1"), go.set())[0]))
    runner([])[0].run([one, other])
    assert order == ["work 1", "travel 0", "work 0"]


def test_a_piece_that_needs_no_travel_of_its_strand_runs_beside_it():
    go, order = threading.Event(), []
    pieces = StrandPiece("comm"), StrandPiece("compute"), StrandPiece("compute", 1.0, (0, 1))
    functions = [
        lambda: (go.wait(10), order.append("travel"))[1],
        lambda: (order.append("beside"), go.set())[0],
        lambda: order.append("behind both"),
    ]
    runner([])[0].run([Calls(pieces, functions)])
    assert order == ["beside", "travel", "behind both"]


def test_fillers_run_while_travel_is_awaited_and_the_rest_at_the_end():
    go, order = threading.Event(), []
    fillers: list[DeferredWork] = [
        lambda: order.append("a"),
        lambda: (order.append("b"), go.set())[0],
        lambda: order.append("c"),
    ]
    runs, spans = runner(fillers)
    travels = ("comm", lambda: (go.wait(10), order.append("travel"))[1])
    runs.run([calls(travels, ("compute", lambda: order.append("work")))])
    assert order[:2] == ["a", "b"], "the travel ends only when these have run"
    assert order.index("travel") < order.index("work")
    assert sorted(order) == ["a", "b", "c", "travel", "work"]
    assert [e.name for e in spans.events].count("weights") == 3


def test_what_goes_wrong_in_travel_is_raised_where_it_is_awaited():
    with pytest.raises(IndexError):
        runner([])[0].run([calls(("comm", lambda: [][0]), ("compute", lambda: None))])


def test_the_end_waits_for_all_travel():
    order: list[str] = []
    runs, _ = runner([])
    runs.run([calls(("comm", lambda: order.append("0"))), calls(("comm", lambda: order.append("1")))])
    assert order == ["0", "1"]
    assert not runs.under_way


def test_results_of_travel_that_only_further_travel_needs_are_not_kept():
    alive: list[bool] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def travel() -> torch.Tensor:
        x = torch.zeros(2)
        made.append(weakref.ref(x))
        return x

    def look() -> None:
        alive.append(made[0]() is not None)

    runner([])[0].run([calls(("comm", travel), ("comm", lambda: None), ("compute", look))])
    assert alive == [False]


def test_what_goes_wrong_in_travel_is_raised_behind_further_travel_too():
    chain = calls(("comm", lambda: [][0]), ("comm", lambda: None), ("compute", lambda: None))
    with pytest.raises(IndexError):
        runner([])[0].run([chain])
