"""The list of regions is the planner's, and each model has those of its mechanisms and kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.anatomy.regions import absent_regions, merged_step_spec, regions_of
from moefold.anatomy.step_specs import block_step_specs
from moefold.config.memory_regions import REGIONS
from moefold.config.run import ModelConfig
from moefold.plan.options import RECOMPUTE_REGIONS
from moefold.plan.time.step_times import RECOMPUTE_COSTS
from moefold.presets.zoo import PRESETS

PLAIN = {"expert_mlp": "reference"}


def model_of(name: str, **changes: object) -> ModelConfig:
    return replace(PRESETS[name]().model, **changes)


def test_planner_and_model_have_one_list():
    assert list(RECOMPUTE_REGIONS) == list(REGIONS)
    assert set(RECOMPUTE_COSTS) == set(REGIONS)
    assert all(bool(region.inside) != bool(region.spans) for region in REGIONS.values())


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_a_region_lies_in_steps_that_the_model_has(name: str):
    model = model_of(name)
    layers = range(model.layers + model.mtp)
    steps = {step.name for layer in layers for step in block_step_specs(model, layer)}
    ends = {"predict", "look_ahead", "set_aside"} if model.mtp else {"predict"}
    for region in regions_of(model, PLAIN).values():
        assert region.steps, region.name
        assert set(region.steps) <= steps | ends, region.name
    for missing in absent_regions(model, PLAIN):
        assert missing == "up" or not steps & set(REGIONS[missing].steps), missing


def test_what_a_model_lacks_has_a_reason():
    absent = absent_regions(model_of("tiny"), PLAIN)
    assert set(absent) == {"up", "mlp", "shared"}
    assert absent["up"] == "attention is gqa: keys and values do not come from a latent"
    assert absent["mlp"] == "no layer of this model has a step mlp"
    assert set(absent_regions(model_of("deepseek-v3-tiny"), PLAIN)) == set()


def test_experts_that_are_one_kernel_have_no_activation_region():
    model = model_of("tiny")
    fused = {"expert_mlp": "gluon"}
    assert "activation" in regions_of(model, PLAIN)
    assert "activation" not in regions_of(model, fused)
    assert "one fused kernel (expert_mlp: gluon)" in absent_regions(model, fused)["activation"]
    gpt_oss = model_of("gpt-oss-20b-tiny")  # biases: no fused kernel takes them
    assert "activation" in regions_of(gpt_oss, fused)


def test_a_merged_step_has_all_weights_and_flops_and_communicates_if_one_does():
    specs = block_step_specs(model_of("deepseek-v3-tiny"), 3)
    merged = merged_step_spec("layer", specs)
    assert merged.parameters == sum(spec.parameters for spec in specs)
    assert merged.flops(64) == pytest.approx(sum(spec.flops(64) for spec in specs))
    assert merged.lane == "comm"
    assert merged_step_spec("two", specs[:2]).lane == "compute"
    assert not merged.static
