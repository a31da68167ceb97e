"""Scales made in one pass over the windows of many operands are those of each operand by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moefold.config.run import PrecisionConfig
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.fp8 import E5M2, ScaleRule
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import Declaration
from moefold.layout.placement import REPLICATED
from moefold.precision.linear import Linear, LinearGroup, PlacedWeight
from moefold.precision.maxima_windows import JoinedWindows
from moefold.precision.operand_history import OperandHistory
from moefold.precision.recipes import RecipeState, attach_recipes
from moefold.precision.scale_histories import ScaleHistories, join_table
from tests.precision.test_delayed import KERNELS, SOUND, delayed_recipe, end_step, numbers

WORLD = single_rank_world()
SHAPES = [(3, 48, 32), (16, 32), (5, 2, 24, 16), (40, 8)]  # of weights, with experts where there are three dims or more
OPTIONS = PrecisionConfig(scaling="delayed", history=4, margin=1)


def histories(rule: ScaleRule, by_channel: bool) -> Iterator[OperandHistory]:
    """With random maxima, of which some experts and channels have none."""
    random = torch.Generator().manual_seed(0)
    roles: list[Role] = ["input", "gradient"]
    for shape in SHAPES:
        declared = Declaration(shape, REPLICATED, std=0.02, stacked=len(shape) > 2)
        for role in roles:
            history = OperandHistory(PlacedWeight(declared, WORLD), role, OPTIONS, rule, by_channel)
            for window in history.windows:
                drawn = torch.rand(window.now.shape, generator=random)
                window.last.copy_(torch.where(drawn < 0.3, 0.0, drawn))
            yield history


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("rule", [ScaleRule(), ScaleRule(E5M2, power_of_two=True)], ids=["e4m3", "e5m2"])
def test_joined_histories_have_the_scales_of_each_alone(rule: ScaleRule, by_channel: bool):
    alone = list(histories(rule, by_channel))
    joined = list(histories(rule, by_channel))
    for windows in zip(*(history.windows for history in joined), strict=True):
        JoinedWindows(windows)
    join_table(joined[0].kind, joined)
    for _ in range(2):
        for mine, right in zip(joined, alone, strict=True):
            for a, b in zip(mine.scales(), right.scales(), strict=True):
                assert torch.equal(a, b)
        for history in (*alone, *joined):  # a later step
            for window in history.windows:
                window.last[2] = window.last[1] * 3


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row"])
def test_layers_of_one_input_quantise_it_once_and_all_list_its_history(name: str):
    layers = torch.nn.Module()
    layers.query = Linear(WORLD, 32, 16, std=0.02)
    layers.key = Linear(WORLD, 32, 24, std=0.02)
    layers.both = LinearGroup(WORLD, layers.query, layers.key)
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    attach_recipes(layers, {"*": name}, KERNELS, PrecisionConfig(scaling="delayed", history=2))
    scales = ScaleHistories(layers, WORLD)
    query, key = delayed_recipe(layers.query), delayed_recipe(layers.key)
    assert layers.both.share_input
    assert query.histories["input"] is key.histories["input"]
    assert query.histories["gradient"] is not key.histories["gradient"]
    assert len(scales.histories) == 3
    for seed in range(3):
        scales.begin_step()
        x = numbers(9, 32, seed).requires_grad_()
        together = layers.both(x)
        torch.autograd.backward(together, [torch.full_like(y, 1 + seed) for y in together])
        apart = [layers.query(x), layers.key(x)]
        assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
        end_step(scales, SOUND)
    state = dict(RecipeState(layers).named_state())
    assert state["query.input_maxima"].any()  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(state["query.input_maxima"], state["key.input_maxima"])  # pyright: ignore[reportArgumentType]
