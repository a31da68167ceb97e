"""Muon, parameter groups and frozen parameters on every kind of axis: what one rank gives, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.run import Config, MuonConfig, OptimConfig, ParallelConfig, PipelineConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import take_next_step
from tests.test_layouts_agree import base, differences

GROUPS = (
    "*.router.weight: rule=adamw lr=0.3",
    "*.experts.*: lr=2 decay=0.5",
    "blocks.0.attention.*: frozen",
    "embedding.weight: lr=0.5 decay=0 betas=0.5,0.8",
)
MUON = OptimConfig(rule="muon")
BY_HEAD = OptimConfig(rule="muon", groups=GROUPS, muon=MuonConfig(heads="each", newton_schulz="polar_express"))
ADAMW = OptimConfig(groups=(*GROUPS, "head.*: frozen", "embedding.weight: frozen"))
FROZEN_START = OptimConfig(rule="muon", groups=("embedding.*: frozen", "blocks.0.*: frozen"))

PLAIN = PipelineConfig()
CASES = [
    (ParallelConfig(), PLAIN, MUON),
    (ParallelConfig(ep=8, dispatcher="dedup"), PLAIN, BY_HEAD),
    (ParallelConfig(etp=4, ep=2), PLAIN, MUON),
    (ParallelConfig(tp=2, cp=2, ep=2, etp=2), PLAIN, BY_HEAD),
    (ParallelConfig(tp=4, cp=2, ep=4), PLAIN, ADAMW),
    (ParallelConfig(pp=2, tp=2, ep=2, etp=2), PLAIN, MUON),
    (ParallelConfig(pp=2, ep=4), PipelineConfig(schedule="interleaved", vpp=2), BY_HEAD),
    (ParallelConfig(pp=4, tp=2), PipelineConfig(schedule="zb_h1"), FROZEN_START),
    (ParallelConfig(pp=2, ep=4), PipelineConfig(pair=True, schedule="dualpipe_v", vpp=2), FROZEN_START),
]


def configuration(parallel: ParallelConfig, pipeline: PipelineConfig, optim: OptimConfig) -> Config:
    config = replace(base(), parallel=parallel, pipeline=pipeline, optim=optim)
    return shrink_config(config, 8)


def test_rules_and_groups_agree_with_one_rank_on_every_kind_of_axis():
    cases = [(configuration(*case), "learned") for case in CASES]
    found = differences(cases, steps=2)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("optim", [BY_HEAD, ADAMW, FROZEN_START])
def test_frozen_parameters_have_no_gradient_no_state_and_do_not_move(optim: OptimConfig):
    config = replace(configuration(ParallelConfig(), PLAIN, optim), pipeline=PLAIN)
    run = assemble_run(config, single_rank_world(), None, random_corpus(config))  # pyright: ignore[reportArgumentType]
    before = {p.name: p.tensor.detach().clone() for p in declared_parameters(run.model)}
    take_next_step(run)
    patterns = [entry.split(".")[0] for entry in optim.groups if entry.endswith("frozen")]
    assert patterns
    with_state = {parameter.name for parameter, *_ in run.optimizer.state()}
    frozen = {name for name, p in run.model.named_parameters() if not p.requires_grad}
    assert frozen
    assert with_state == before.keys() - frozen
    assert {p.name for bucket in run.gradients.buckets for p in bucket.parameters} == with_state
    for name, parameter in run.model.named_parameters():
        if name in frozen:
            assert parameter.grad is None, name
            assert (parameter == before[name]).all(), name
        elif not name.endswith("bias"):
            assert (parameter != before[name]).any(), name
