"""Muon, parameter groups and frozen parameters on every kind of axis: what one rank gives, in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moefold.config.run import Config, MuonConfig, OptimConfig, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import (
    TOLERANCE,
    RankTrace,
    first_mismatch,
    random_corpus,
    shrink_config,
    single_rank_config,
    trace_run,
)
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks

RANKS = 4
GROUPS = (
    "*.router.weight: rule=adamw lr=0.3",
    "*.experts.*: lr=2 decay=0.5",
    "blocks.0.attention.*: frozen",
    "embedding.weight: lr=0.5 decay=0 betas=0.5,0.8",
)
MUON = OptimConfig(rule="muon")
BY_HEAD = OptimConfig(rule="muon", groups=GROUPS, muon=MuonConfig(heads="each", newton_schulz="polar_express"))
ADAMW = OptimConfig(groups=(*GROUPS, "head.*: frozen", "embedding.weight: frozen"))
IN_BACKWARD = OptimConfig(when="backward", clip_by="previous", groups=GROUPS[:2])
ON_HOST = OptimConfig(states="host", groups=("*.norm.weight: frozen",))
MUON_IN_BACKWARD = OptimConfig(rule="muon", when="backward", clip_by="previous", states="host")
FROZEN_START = OptimConfig(rule="muon", groups=("embedding.*: frozen", "blocks.0.*: frozen"))

PLAIN = PipelineConfig()
CASES = [
    (ParallelConfig(), PLAIN, MUON),
    (ParallelConfig(ep=4, dispatcher="dedup"), PLAIN, BY_HEAD),
    (ParallelConfig(tp=2, cp=2, context="ring", ep=2, etp=2), PLAIN, MUON),
    (ParallelConfig(tp=2, etp=4), PLAIN, BY_HEAD),
    (ParallelConfig(tp=2, cp=2, context="ring"), PLAIN, ADAMW),
    (ParallelConfig(ep=4), PLAIN, IN_BACKWARD),
    (ParallelConfig(tp=2, ep=2), PLAIN, ON_HOST),
    (ParallelConfig(tp=2, ep=2, etp=2), PLAIN, MUON_IN_BACKWARD),
    (ParallelConfig(pp=2, tp=2, etp=2), PLAIN, MUON),
    (ParallelConfig(pp=2, ep=2), PipelineConfig(schedule="interleaved", vpp=2), BY_HEAD),
    (ParallelConfig(pp=4), PipelineConfig(schedule="zb_h1"), FROZEN_START),
    (ParallelConfig(pp=2, ep=2), PipelineConfig(pair=True, schedule="dualpipe_v", vpp=2), FROZEN_START),
]


def configuration(parallel: ParallelConfig, pipeline: PipelineConfig, optim: OptimConfig, ranks: int = RANKS) -> Config:
    """Shared experts, a dense layer, biases and norms of heads."""
    config = PRESETS["tiny"]()
    attention = replace(config.model.attention, qk_norm="head", qkv_bias=True)
    moe = replace(config.model.moe, shared_ffn=16, shared_gate=True, dense_layers=1)
    model = replace(config.model, attention=attention, moe=moe)
    train = replace(config.train, precision="fp64")
    whole = replace(config, model=model, train=train, parallel=parallel, pipeline=pipeline, optim=optim)
    return shrink_config(whole, ranks)


def traces_of(world: World, cases: list[Config]) -> list[RankTrace]:
    """Two steps of each case, in turn on the same processes."""
    traces = []
    for config in cases:
        here = create_world(world.rank, world.size, world.device, config.parallel)
        traces.append(trace_run(config, here, 2))
    return traces


def differences(cases: list[Config]) -> list[str]:
    """How ranks differ from one rank, for each case in which they do."""
    on_ranks = run_ranks(traces_of, RANKS, cases)
    found = []
    for number, config in enumerate(cases):
        alone = single_rank_config(config)
        expected = trace_run(alone, single_rank_world(), 2)
        difference = first_mismatch(expected, [rank[number] for rank in on_ranks], TOLERANCE["fp64"])
        if difference:
            found.append(f"{config.parallel} {config.pipeline.schedule} {config.optim.rule}: {difference}")
    return found


@pytest.mark.extended
def test_rules_and_groups_agree_with_one_rank_on_every_kind_of_axis():
    found = differences([configuration(*case) for case in CASES])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("optim", [BY_HEAD, ADAMW, FROZEN_START])
def test_frozen_parameters_have_no_gradient_no_state_and_do_not_move(optim: OptimConfig):
    config = configuration(ParallelConfig(), PLAIN, optim, ranks=1)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    before = {p.name: p.tensor.detach().clone() for p in declared_parameters(run.model)}
    take_next_step(run)
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
