"""What an executor derives from a program is made once, and is what the program says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.anatomy.stage_contents import pipeline_program
from moefold.config.run import Config, PipelineConfig
from moefold.layout.axes import World, single_rank_world
from moefold.memory.policy import Keep, attach_policies
from moefold.pipeline import executor as executor_module
from moefold.pipeline.bound_program import bind_program, forward_program
from moefold.pipeline.inbox import messages_between
from moefold.schedule.program import PipelineOp
from moefold.train.assemble import assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.parity import random_corpus
from moefold.train.step import train_step
from tests.model.test_step_borders import Recorder
from tests.pipeline.test_executor import small
from tests.support.ranks import run_ranks


def test_a_bound_program_is_one_ranks_part():
    config = small(PipelineConfig("1f1b", 2, pair=True), 2, pp=2)
    program, homes = pipeline_program(config, 4), [0, 1, 0, 1]
    bound = bind_program(program, homes, 1, {"weight": ({1, 3}, False)})
    assert bound.slots == program[1]
    assert bound.messages == {0: messages_between(program, homes, 0, 1)}
    paired = {op for slot in program[1] if {"F", "D"} <= {op.kind for op in slot} for op in slot}
    assert bound.paired_passes == {(op.stage, op.microbatch) for op in paired}
    last = max(n for n, slot in enumerate(program[1]) for op in slot if op.kind == "D")
    assert bound.last_gradients == {last: {"weight"}}


def test_a_forward_program_has_every_stage_and_microbatch_once():
    program = forward_program([0, 1, 1, 0], 2)
    assert program[0] == [(PipelineOp("F", stage, m),) for stage in (0, 3) for m in range(2)]
    assert program[1] == [(PipelineOp("F", stage, m),) for stage in (1, 2) for m in range(2)]


def test_programs_and_step_lists_are_made_once(monkeypatch: pytest.MonkeyPatch):
    config: Config = small(PipelineConfig(pair=True), 1)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    made: list[object] = []

    def counted(config: Config, microbatches: int) -> object:
        made.append(microbatches)
        return pipeline_program(config, microbatches)

    monkeypatch.setattr(executor_module, "pipeline_program", counted)
    steps = run.executor.steps_to_train(0)
    for _ in range(2):
        train_step(run, run.loader.next_batch())
        validation_loss(run)
    assert len(made) == 1
    assert run.executor.steps_to_train(0) is steps
    assert len(run.executor.forward_programs) == 1


def test_step_lists_follow_the_mode_of_the_model_and_its_policies():
    config = small(PipelineConfig(), 1, "deepseek-v3-tiny")
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    trained = [step.spec.name for step in run.executor.steps_to_train(0)]
    assert "look_ahead" in trained
    run.model.eval()
    assert "look_ahead" not in [step.spec.name for step in run.executor.steps_to_train(0)]
    run.model.train()
    attach_policies(run.model, {"layer": Keep()})
    assert "layer" in [step.spec.name for step in run.executor.steps_to_train(0)]


def moments_of_a_step(
    world: World, pipeline: PipelineConfig
) -> tuple[list[tuple[str, str, str, tuple[int, int]]], int]:
    config = small(pipeline, world.size, pp=2, ep=1)
    run = assemble_run(config, world, Path("."), random_corpus(config))
    recorder = Recorder()
    with run.executor.observed_by(recorder):
        train_step(run, run.loader.next_batch())
    own = [stage for stage, home in enumerate(run.executor.homes) if home == run.executor.rank]
    microbatches = next(iter(run.executor.train_programs))
    steps = sum(len(run.executor.steps_to_train(stage)) for stage in own)
    return recorder.moments, 4 * steps * microbatches


@pytest.mark.parametrize("pair", [False, True])
def test_observers_see_every_step_on_every_pipeline_rank(pair: bool):
    for moments, expected in run_ranks(moments_of_a_step, 2, PipelineConfig("1f1b", 2, pair=pair), pp=2):
        assert len(moments) == expected
