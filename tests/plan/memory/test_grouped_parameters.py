"""What the planner counts for frozen parameters and for rules of groups is what a run holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.optim.parameter_groups import ParameterGroups
from moefold.plan.memory.grouped_parameters import trained_share
from moefold.plan.memory.peak_memory import plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run, choose_kernels
from moefold.train.parity import random_corpus

CHOICES = PlanChoices(precision="fp32", device="cpu")
SMALL = ["--train.device=cpu", "--train.precision=fp32", "--model.mtp=1", "--observe.tensorboard=false"]
GROUPS = {
    "frozen experts": ["--optim.groups=*.moe.experts.*: frozen"],
    "one layer alone": ["--optim.groups=blocks.1.*: lr=2,blocks.*: frozen,ahead.*: frozen"],
    "Muon, routers by AdamW": ["--optim.rule=muon", "--optim.groups=*.router.weight: rule=adamw"],
    "Muon for the embedding": ["--optim.rule=muon", "--optim.groups=embedding.*: rule=muon,head.*: frozen"],
    "Muon for experts alone": ["--optim.groups=*.experts.*: rule=muon"],
}


@pytest.mark.parametrize("name", GROUPS)
def test_gradients_and_moments_are_those_of_a_run(name: str):
    config = resolve_recipe("tiny", [*SMALL, *GROUPS[name]])
    world = single_rank_world()
    run = assemble_run(config, world, Path("."), random_corpus(config))
    groups = ParameterGroups(config.optim, choose_kernels(config, world))
    trained, moments, whole = 0, 0, 0
    for parameter in declared_parameters(run.model):
        size = parameter.tensor.numel()
        whole += size
        if not groups.is_frozen(parameter.name):
            trained += size
            rule = groups.rules[groups.group_of(parameter).name].rule
            moments += (1 if rule.whole else 2) * size
    two_microbatches = replace(config.train, global_batch=2 * config.train.micro_batch)
    [rank] = plan_memory(replace(config, train=two_microbatches), 1, CHOICES)
    assert rank.parameters == whole
    assert rank.gradients == pytest.approx(4 * trained)
    assert rank.moments == pytest.approx(4 * moments)
    assert trained_share(config.model, config.optim.groups) == pytest.approx(trained / whole)


def test_stages_of_a_pipeline_count_what_they_freeze():
    words = ["--parallel.pp=2", "--model.layers=4", "--optim.groups=blocks.0.*: frozen,blocks.1.*: frozen"]
    config = resolve_recipe("tiny", words, world=2)
    free, _ = plan_memory(replace(config, optim=replace(config.optim, groups=())), 2, CHOICES)
    first, second = plan_memory(config, 2, CHOICES)
    embedding = config.model.vocab * config.model.hidden
    assert first.moments == pytest.approx(8 * embedding)
    assert second.moments > first.moments
    assert first.total < free.total
