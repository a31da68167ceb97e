"""Statistics of FP8 operands: counted by hand, once for each microbatch, and nothing outside recorded steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product import ExpertRows
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import Declaration
from moefold.layout.placement import sharded_over_experts
from moefold.observe.fp8_stats import Figures, ProductOperands
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import GroupedLinear, Linear, LinearGroup, PlacedWeight
from moefold.precision.operand_statistics import OperandStatistics
from moefold.precision.operand_watch import MOST_EXPERTS, MOST_OUTPUTS, MOST_TILES, OperandWatch
from moefold.precision.recipes import attach_recipes
from moefold.precision.scale_histories import ScaleHistories
from moefold.train.operand_log import read_operands
from tests.precision.test_delayed import end_step

KERNELS = BoundKernels(Facts("cpu", "fp32", hidden=32, ffn=32))
WORLD = single_rank_world()
ROWS, WIDTH = 40, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = Linear(WORLD, WIDTH, 16, std=0.02)
        self.key = Linear(WORLD, WIDTH, 16, std=0.02)
        self.both = LinearGroup(WORLD, self.query, self.key)
        self.out = Linear(WORLD, WIDTH, WIDTH, std=0.02)
        weight = PlacedWeight(Declaration((2, 16, WIDTH), sharded_over_experts(1), std=0.02, stacked=True), WORLD)
        self.down = GroupedLinear(KERNELS, placed_weight=weight)


class Model(nn.Module):
    def __init__(self, recipe: str, is_rerun: Callable[[], bool] = lambda: False, **options: object):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        attach_recipes(self, {"*": recipe}, KERNELS, PrecisionConfig(**options))  # pyright: ignore[reportArgumentType]
        self.histories = ScaleHistories(self, WORLD)
        self.statistics = OperandStatistics(self, WORLD, 3, is_rerun)

    @property
    def block(self) -> Block:
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block

    def recorded(self) -> dict[str, ProductOperands]:
        operands = self.statistics.end_step()
        assert operands is not None
        return {each.product: each for each in read_operands(operands, layers=1)}


def recipe_of(layer: Linear | GroupedLinear) -> Fp8Recipe:
    assert isinstance(layer.recipe, Fp8Recipe)
    return layer.recipe


def known_values() -> Tensor:
    """With one scale for all, which is 1: bytes are exact but for two values, of which one underflows."""
    x = torch.zeros(ROWS, WIDTH)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = -448.0, 1.0, 2.0**-11, 17.0
    return x


def test_counts_are_those_made_by_hand():
    model = Model("fp8_tensor")
    model.statistics.begin_step(3)
    recipe_of(model.block.out).input(known_values(), None)
    recipe_of(model.block.out).gradient(known_values()[:5] / 16, None)
    found = model.recorded()["blocks.0.out"]
    # Each value twice: along rows and along columns. 17 lies between 16 and 18, and the tie goes to 16.
    squares = 448.0**2 + 1 + 2.0**-22 + 17**2
    assert found.activation[:5] == (8, 2, 2 * (1 + 2.0**-22), 2 * squares, 0)
    assert found.activation[5:] == (448, 1, -1)
    assert found.gradient[:2] == (8, 2)
    assert found.gradient[5:] == (28, 1 / 16, -1 / 16)
    assert found.weight.values == 0, "no product was computed"
    figures: Figures = found.activation.figures()
    assert figures["underflow"] == 0.25
    assert figures["error"] == pytest.approx(((1 + 2.0**-22) / squares) ** 0.5, rel=1e-5)


def test_layers_that_read_one_input_are_one_entry_and_are_still_multiplied_together():
    model = Model("fp8_block")
    assert list(model.statistics.watches) == ["blocks.0.query, key", "blocks.0.out", "blocks.0.down"]
    assert model.block.both.share_input
    assert model.block.out.recipe is not model.block.query.recipe


def test_a_plain_model_has_no_statistics():
    model = Model("plain")
    model.statistics.begin_step(3)
    assert model.statistics.end_step() is None


def test_only_recorded_steps_are_seen():
    model = Model("fp8_block")
    layer = model.block.out
    for step in (1, 2, 4):
        model.statistics.begin_step(step)
        layer(torch.randn(ROWS, WIDTH)).sum().backward()
        assert recipe_of(layer).watch.seen is None
        assert model.statistics.end_step() is None
    model.statistics.begin_step(6)
    layer(torch.randn(ROWS, WIDTH)).sum().backward()
    assert model.recorded()["blocks.0.out"].activation.values == 2 * ROWS * WIDTH
    layer(torch.randn(ROWS, WIDTH))  # validation
    model.statistics.begin_step(9)
    assert model.recorded()["blocks.0.out"].activation.values == 0


def test_microbatches_add_up_and_weights_and_repeated_forwards_count_once():
    repeats = False

    def is_rerun() -> bool:
        return repeats

    model = Model("fp8_row", is_rerun)
    layer = model.block.out
    model.statistics.begin_step(3)
    parts = [torch.randn(ROWS, WIDTH) * (1 + i) for i in range(3)]
    for x in parts:
        layer(x)
        repeats = True
        y = layer(x)
        y.backward(torch.ones_like(y))  # in backward, as a rerun is: gradients count
        repeats = False
    found = model.recorded()["blocks.0.out"]
    assert found.activation.values == 3 * 2 * ROWS * WIDTH
    assert found.gradient.values == 3 * 2 * ROWS * WIDTH
    assert found.weight.values == 2 * WIDTH * WIDTH, "both layouts, once"
    assert found.activation.amax == torch.stack(parts).abs().max()
    assert found.weight.amax == layer.weight.abs().max()
    error = found.weight.figures()["error"]
    assert error is not None
    assert 0.02 < error < 0.03


def test_saturated_values_are_those_that_the_histories_count():
    model = Model("fp8_tensor", scaling="delayed")
    recipe = recipe_of(model.block.down)
    rows = ExpertRows(torch.tensor([10, ROWS]).int())
    model.statistics.begin_step(3)
    recipe.input(torch.ones(ROWS, WIDTH), rows)
    end_step(model.histories, torch.tensor(True))
    assert model.recorded()["blocks.0.down"].activation.saturated == 0
    model.histories.begin_step()
    model.statistics.begin_step(6)
    x = torch.ones(ROWS, WIDTH)
    x[0, 0], x[20, 3] = 2.0, -30.0
    recipe.input(x, rows)
    end_step(model.histories, torch.tensor(True))
    found = model.recorded()["blocks.0.down"].activation
    assert found.saturated == 4
    assert torch.equal(recipe.state()["input_saturated"], torch.tensor([4]))  # pyright: ignore[reportArgumentType]
    assert found.figures()["saturated"] == pytest.approx(4 / (2 * ROWS * WIDTH), rel=1e-5)


def test_of_large_operands_a_part_is_read_and_another_in_the_next_recorded_step():
    model = Model("fp8_tensor")
    layer = model.block.out
    tiles = 2 * MOST_TILES - 1  # and one that has no rows
    x = torch.ones(tiles, 128, WIDTH)
    x[1::2] = 5.0
    for step, amax in ((3, 5.0), (6, 1.0)):
        model.statistics.begin_step(step)
        recipe_of(layer).input(x.flatten(0, 1), None)
        found = model.recorded()["blocks.0.out"].activation
        assert found.values == pytest.approx(2 * x.numel(), rel=0.05), "in proportion"
        assert found.amax == amax
    weight = torch.ones(2 * MOST_EXPERTS, 2 * MOST_OUTPUTS, 16)
    weight[:MOST_EXPERTS, MOST_OUTPUTS:] = 5.0
    for step, amax in ((3, 1.0), (6, 5.0)):
        model.statistics.begin_step(step)
        recipe_of(layer).weight(weight)
        found = model.recorded()["blocks.0.out"].weight
        assert found.values == 2 * weight.numel()
        assert found.amax == amax


def test_every_output_of_every_expert_has_its_turn():
    watch = OperandWatch(KERNELS, lambda: False)
    experts, outputs = 4 * MOST_EXPERTS, 2 * MOST_OUTPUTS
    looks_EN = torch.zeros(experts, outputs, dtype=torch.int64)
    for turn in range(8):
        watch.begin(turn)
        looks_EN[watch.part_of_weight(experts, outputs)] += 1
    assert bool((looks_EN == 1).all())
