"""Observers are called around every step, forward and backward, and cost nothing where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.anatomy.step_specs import StepSpec
from moefold.config.run import PipelineConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.rerun import rerun_key
from moefold.model import step_borders
from moefold.model.steps import Around, Carry, PassKey, PassKind, Step, inside_recompute, rerun_step
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import one_segment, segments_for_pairing
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step

Moment = tuple[str, str, str, PassKey]


class Recorder:
    """A toy observer: the moments in the order in which they come."""

    def __init__(self):
        self.moments: list[Moment] = []

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        self.moments.append(("before", step.spec.name, kind, key))

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        self.moments.append(("after", step.spec.name, kind, key))


class Narrator(Recorder):
    """Notes the work that steps and their backwards do between the moments."""

    def work(self, name: str) -> None:
        self.moments.append(("work", name, "", (0, 0)))


class Worked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, narrator, name, x):
        ctx.narrator, ctx.label = narrator, name
        narrator.work(f"{name} F")
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        ctx.narrator.work(f"{ctx.label} D")
        return None, None, gradients[0] * 2


def toy_step(narrator: Narrator, name: str, weight: torch.Tensor | None = None) -> Step:
    def run(carry: Carry) -> Carry:
        x = Worked.apply(narrator, name, carry["x"])
        beside = carry["beside"] if weight is None else [Worked.apply(narrator, f"{name} weight", weight)]
        return {**carry, "x": x, "beside": beside, "same": x}

    return Step(StepSpec(name, "compute", True, ""), run)


def run_passage(steps: Sequence[Step], cut: bool, observers: Sequence[Around], x: torch.Tensor) -> Carry:
    segments = segments_for_pairing(steps) if cut else one_segment(steps)
    passage = Passage(segments, observers, (3, 5))
    carry = passage.forward({"x": x, "beside": [], "text": "plain"})
    loss = carry["x"].sum() + carry["same"].sum() + sum(y.sum() for y in carry["beside"])
    passage.set_output_gradients([loss], [torch.ones_like(loss)])
    passage.backward()
    return carry


@pytest.mark.parametrize("cut", [False, True])
def test_moments_enclose_the_work_of_their_step(cut: bool):
    narrator = Narrator()
    weight = torch.ones(2, requires_grad=True)
    steps = [toy_step(narrator, "a"), toy_step(narrator, "b", weight), toy_step(narrator, "c")]
    run_passage(steps, cut, [narrator], torch.ones(2, requires_grad=True))
    at = {moment[:3]: number for number, moment in enumerate(narrator.moments)}
    for name, works in (("a", ["a"]), ("b", ["b", "b weight"]), ("c", ["c"])):
        for kind in "FD":
            for work in works:
                done = at["work", f"{work} {kind}", ""]
                assert at["before", name, kind] < done < at["after", name, kind], (work, kind)
    moments = [moment for moment in narrator.moments if moment[0] != "work"]
    forward = [(when, name, "F", (3, 5)) for name in "abc" for when in ("before", "after")]
    backward = [(when, name, "D", (3, 5)) for name in "cba" for when in ("before", "after")]
    assert moments == [*forward, *backward]


def test_a_step_behind_which_nothing_is_trained_has_no_backward():
    narrator = Narrator()
    weight = torch.ones(2, requires_grad=True)
    steps = [toy_step(narrator, "a"), toy_step(narrator, "b", weight)]
    run_passage(steps, False, [narrator], torch.ones(2))
    moments = [moment[:3] for moment in narrator.moments if moment[0] != "work" and moment[2] == "D"]
    assert moments == [("before", "b", "D"), ("after", "b", "D")]


def test_after_moments_come_in_reverse_order_of_observers():
    order: list[str] = []

    class Named(Recorder):
        def __init__(self, name: str):
            self.name = name

        def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
            order.append(f"before {self.name}")

        def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
            order.append(f"after {self.name}")

    run_passage([toy_step(Narrator(), "a")], False, [Named("1"), Named("2")], torch.ones(2, requires_grad=True))
    assert order == ["before 1", "before 2", "after 2", "after 1"] * 2


def small_run(pipeline: PipelineConfig) -> Run:
    start = PRESETS["deepseek-v3-tiny"]()
    config = shrink_config(replace(start, pipeline=pipeline), 1)
    config = replace(config, train=replace(config.train, precision="fp32", global_batch=3, micro_batch=1))
    return assemble_run(config, single_rank_world(), Path("."), random_corpus(config))


WAYS = {
    "plain": PipelineConfig(),
    "paired": PipelineConfig(pair=True),
    "deferred": PipelineConfig(defer=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_step_of_every_microbatch_has_its_moments_and_the_numbers_stay(way: str):
    watched, plain = small_run(WAYS[way]), small_run(WAYS[way])
    recorder = Recorder()
    with watched.executor.observed_by(recorder):
        first = train_step(watched, watched.loader.next_batch())
    assert first.loss == train_step(plain, plain.loader.next_batch()).loss
    for one, two in zip(watched.gradients.buckets, plain.gradients.buckets, strict=True):
        assert torch.equal(one.weights, two.weights)
    executor = watched.executor
    for stage in executor.stages:
        names = [step.spec.name for step in executor.steps_to_train(stage.number)]
        for microbatch in range(3):
            for kind, ordered in (("F", names), ("D", names[::-1])):
                mine = [m[:2] for m in recorder.moments if m[2:] == (kind, (stage.number, microbatch))]
                expected = [(when, name) for name in ordered for when in ("before", "after")]
                if way == "paired":  # shared experts run beside an exchange: their place in the order is free
                    mine, expected = (shared_experts_last(moments) for moments in (mine, expected))
                assert mine == expected, (kind, stage.number, microbatch)


def shared_experts_last(moments: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(moments, key=lambda moment: moment[1] == "shared")


def test_paired_passes_are_interleaved_under_their_own_keys():
    run = small_run(WAYS["paired"])
    recorder = Recorder()
    with run.executor.observed_by(recorder):
        train_step(run, run.loader.next_batch())
    passes = [moment[2:] for moment in recorder.moments]
    first, last = passes.index(("F", (0, 1))), len(passes) - passes[::-1].index(("F", (0, 1)))
    assert ("D", (0, 0)) in passes[first:last]


def test_forward_only_has_forward_moments():
    run = small_run(PipelineConfig())
    recorder = Recorder()
    parts = list(run.loader.next_batch().microbatches(1))
    with run.executor.observed_by(recorder):
        run.executor.forward_only(parts, lambda carry: None)
    names = [step.spec.name for step in run.executor.steps_to_streams(0)]
    moments = [moment for moment in recorder.moments if moment[3] == (0, 2)]
    assert [moment[1] for moment in moments if moment[0] == "before"] == names
    assert {moment[2] for moment in moments} == {"F"}


def test_without_observers_no_border_is_made(monkeypatch: pytest.MonkeyPatch):
    """Neither an object nor an autograd node: the graph is that of the steps alone."""

    def refuse(*_: object) -> None:
        raise AssertionError("made without an observer")

    monkeypatch.setattr(step_borders.ObservedSteps, "__init__", refuse)
    monkeypatch.setattr(step_borders, "carry_through_border", refuse)
    for way in ("plain", "paired"):
        run = small_run(WAYS[way])
        train_step(run, run.loader.next_batch())
    x = torch.ones(2, requires_grad=True)
    narrator = Narrator()
    out = run_passage([toy_step(narrator, "a"), toy_step(narrator, "b")], False, (), x)
    names, node = [], out["x"].grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[-1][0] if node.next_functions else None
    assert names == ["WorkedBackward", "WorkedBackward", "CutBackward"], "the cut before the first step, and no more"


# ---- running a step again ----


class RunAgain(torch.autograd.Function):
    """A toy recompute: keeps the inputs of a step, and runs it again in backward under the key of the first run."""

    @staticmethod
    def forward(ctx, step, key, x):
        ctx.step, ctx.key = step, key
        ctx.save_for_backward(x)
        with torch.no_grad():
            return step.run({"x": x})["x"]

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        out = rerun_step(ctx.step, {"x": leaf}, ctx.key)
        torch.autograd.backward([out["x"]], [gradients[0]])
        return None, None, leaf.grad


def test_a_step_runs_again_in_backward_under_its_key_and_counts_nothing():
    counted: list[str] = []
    keys: list[PassKey | None] = []
    weight = torch.full((2,), 3.0, requires_grad=True)

    def count_and_square(carry: Carry) -> Carry:
        keys.append(rerun_key())
        if not inside_recompute():
            counted.append("once")
        return {"x": carry["x"].square() * weight}

    step = Step(StepSpec("square", "compute", True, ""), count_and_square)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = RunAgain.apply(step, (1, 4), x)
    y.sum().backward()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert counted == ["once"]
    assert keys == [None, (1, 4)]
    assert torch.equal(x.grad, 6 * x.detach())  # pyright: ignore[reportArgumentType]
    assert torch.equal(weight.grad, x.detach().square())  # pyright: ignore[reportArgumentType]


def test_a_rerun_outside_of_backward_counts_nothing_either():
    seen: list[bool] = []

    def note(carry: Carry) -> Carry:
        seen.append(inside_recompute())
        return carry

    step = Step(StepSpec("note", "compute", True, ""), note)
    step.run({})
    rerun_step(step, {}, (0, 0))
    step.run({})
    assert seen == [False, True, False]
