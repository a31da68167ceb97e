"""Gradient memory in backward is that of the trainer's buckets: weights of one kind share it, from their first gradient
on."""

from __future__ import annotations

import torch

from moefold.anatomy.step_specs import StepSpec, WeightSpec
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import single_rank_world
from moefold.layout.placement import BUCKET_ELEMENTS, DimCuts
from moefold.plan.layer.layer_costs import count_piece
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.memory.gradient_buckets import buckets_of_steps, gradients_before_steps
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from moefold.shard.buckets import Grouping, one_group
from tests.support.models import transformer


def step(name: str, *weights: WeightSpec) -> StepSpec:
    return StepSpec(name, "compute", True, "", weights=weights)


def test_a_bucket_has_its_memory_when_its_first_gradient_has_come():
    half = (BUCKET_ELEMENTS // 4, 2)
    over_rows: DimCuts = ((0, "tp"),)
    attend = step("attend", WeightSpec("query", half, cut=over_rows), WeightSpec("out", (4, 4), cut=((1, "tp"),)))
    embed = step("embed", WeightSpec("words", (BUCKET_ELEMENTS, 4), cut=over_rows))
    degrees = {"tp": 1}
    assert gradients_before_steps([attend, attend, embed], degrees) == [0, BUCKET_ELEMENTS + 32, BUCKET_ELEMENTS + 32]
    whole = BUCKET_ELEMENTS // 2 + BUCKET_ELEMENTS * 4
    assert gradients_before_steps([attend, embed], degrees) == [0, whole + 16]


def test_large_buckets_are_those_that_the_trainer_fills():
    """Of Qwen3 with 12 layers: the last one has queries of the second layer, and the embedding."""
    config = resolve_recipe("qwen3-30b-a3b", ["--model.layers=12"])
    with torch.device("meta"):
        model = transformer(config.model, 64, BoundKernels(facts_from_config(config, "cpu", "bf16")))
    grouping = Grouping(single_rank_world("cpu"), BUCKET_ELEMENTS, {}, one_group, None, {}, False)
    filled = [sum(p.tensor.numel() for p in parameters) for _, parameters in grouping.group_parameters(model)]
    portion = make_rank_portion(config, "local", defers_wgrad=False)
    pieces = [("L", 0), *(("t", layer) for layer in reversed(range(12))), ("E", 0)]
    specs: list[StepSpec] = []
    for piece, layer in pieces:
        steps = count_piece(config.model, piece, layer, portion, PlanChoices()).steps
        specs += [count.spec for count in reversed(steps)]
    planned = [bucket.elements for bucket in buckets_of_steps(specs, portion.degrees)]
    large = [sorted(size for size in sizes if size >= BUCKET_ELEMENTS) for sizes in (filled, planned)]
    assert large[0] == large[1]
