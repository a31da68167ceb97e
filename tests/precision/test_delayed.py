"""Delayed scales: those of a step follow from the largest magnitudes of the steps before, by a closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product import ExpertRows, Role
from moefold.kernels.quantise.row_tiles import RowTiles, row_tiles
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import Declaration
from moefold.layout.placement import sharded_over_experts
from moefold.precision.delayed import DelayedFp8Recipe
from moefold.precision.fp8 import Fp8Recipe, TileOperand
from moefold.precision.linear import GroupedLinear, Linear, PlacedWeight
from moefold.precision.recipes import RecipeState, attach_recipes, make_recipe
from moefold.precision.scale_histories import ScaleHistories

KERNELS = BoundKernels(Facts("cpu", "fp32", hidden=32, ffn=32))
WORLD = single_rank_world()
SOUND = torch.tensor(True)
NAMES = ["fp8_tensor", "fp8_row"]
INPUTS, OUTPUTS, EXPERTS = 32, 48, 3


class Layers(nn.Module):
    """A dense layer and two grouped products, of which the first reads tokens."""

    def __init__(self):
        super().__init__()
        declared = Declaration((EXPERTS, OUTPUTS, INPUTS), sharded_over_experts(1), std=0.02, stacked=True)
        weight = PlacedWeight(declared, WORLD)
        self.dense = Linear(WORLD, INPUTS, OUTPUTS, std=0.02)
        self.up = GroupedLinear(KERNELS, reads_tokens=True, placed_weight=weight)
        self.down = GroupedLinear(KERNELS, placed_weight=weight)


def layers_with(name: str, **options: Any) -> tuple[Layers, ScaleHistories]:
    layers = Layers()
    attach_recipes(layers, {"*": name}, KERNELS, PrecisionConfig(scaling="delayed", **options))
    return layers, ScaleHistories(layers, WORLD)


def current_recipe(name: str) -> Fp8Recipe:
    recipe = make_recipe(RECIPE_SPECS[name], KERNELS, PrecisionConfig())("dense", Layers().dense)
    assert isinstance(recipe, Fp8Recipe)
    return recipe


def delayed_recipe(layer: Linear | GroupedLinear) -> DelayedFp8Recipe:
    assert isinstance(layer.recipe, DelayedFp8Recipe)
    return layer.recipe


def numbers(rows: int, width: int, seed: int) -> Tensor:
    """Of another magnitude for every seed."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=random) * (1 + seed * 7 % 5)


def scales(operand: TileOperand) -> tuple[Tensor, Tensor]:
    assert operand.rows is not None
    assert operand.columns is not None
    return operand.rows.scales[:, 0], operand.columns.scales[..., 0]


def assert_same_bits(a: TileOperand, b: TileOperand) -> None:
    for mine, right in ((a.rows, b.rows), (a.columns, b.columns)):
        assert mine is not None
        assert right is not None
        assert torch.equal(mine.values.view(torch.uint8), right.values.view(torch.uint8))
        assert torch.equal(mine.scales, right.scales)


def end_step(histories: ScaleHistories, sound: Tensor) -> None:
    histories.write_places()
    histories.record_step(sound)
    histories.note_recorded()


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("role", ["input", "gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_dense_layer_come_from_the_largest_values_of_the_last_steps(name: str, role: Role, margin: int):
    layers, histories = layers_with(name, history=3, margin=margin)
    recipe = delayed_recipe(layers.dense)
    quantise = recipe.input if role == "input" else recipe.gradient
    width = INPUTS if role == "input" else OUTPUTS
    seen: list[Tensor] = []  # of each step the largest of every channel, over two microbatches
    for step in range(6):
        histories.begin_step()
        parts = [numbers(150, width, seed=2 * step + i) for i in range(2)]
        for x in parts:
            rows, columns = scales(quantise(x, None))
            if not seen:
                assert_same_bits(quantise(x, None), current_recipe(name).input(x, None))
                continue
            most_C = torch.stack(seen[-3:]).amax(0) * 2**margin
            expected = most_C / 448 if name == "fp8_row" else (most_C.max() / 448).expand(width)
            assert torch.equal(rows, (most_C.max() / 448).expand_as(rows))
            assert torch.equal(columns, expected.expand_as(columns))
        seen.append(torch.cat(parts).abs().amax(0))
        end_step(histories, SOUND)


def grouped_rows(counts: list[int], seed: int) -> tuple[Tensor, ExpertRows]:
    ends = torch.tensor(counts).cumsum(0).int()
    return numbers(sum(counts), INPUTS, seed), ExpertRows(ends)


def used_tiles(tiles: RowTiles) -> Tensor:
    return tiles.tiles_M4[:, 2] > 0


@pytest.mark.parametrize("name", NAMES)
def test_experts_and_their_channels_have_histories_of_their_own(name: str):
    layers, histories = layers_with(name)
    recipe = delayed_recipe(layers.down)
    x, rows = grouped_rows([130, 0, 7], seed=3)
    x[130:] *= 16
    x[:, 5] = 0
    recipe.input(x, rows)
    end_step(histories, SOUND)
    y, rows = grouped_rows([5, 5, 5], seed=4)
    operand = recipe.input(y, rows)
    by_row, by_column = scales(operand)
    first, last = x[:130].abs(), x[130:].abs()
    # The second expert had no rows: it has the scale of the largest.
    of_experts = torch.stack([first.max(), last.max(), last.max()]) / 448
    used = used_tiles(operand.tiles)
    assert torch.equal(by_row.view(-1, 128)[used], of_experts[:, None].expand(-1, 128))
    if name == "fp8_tensor":
        assert torch.equal(by_column[used], of_experts[:, None].expand(-1, INPUTS))
        return
    channels = torch.stack([first.amax(0), last.max().expand(INPUTS), last.amax(0)]) / 448
    channels[:, 5] = of_experts  # nothing but zeros was seen of this channel
    assert torch.equal(by_column[used], channels)


@pytest.mark.parametrize("name", NAMES)
def test_rows_gathered_as_they_are_read_have_the_bits_and_the_history_of_rows_gathered_before(name: str):
    ends = torch.tensor([130, 130, 137]).int()
    tiles = row_tiles(ends, 137)
    sources = [numbers(40, INPUTS, seed) for seed in (3, 8)]
    index = torch.arange(137) * 7 % 40
    found = []
    for gathered in (False, True):
        layers, histories = layers_with(name)
        recipe = delayed_recipe(layers.down)
        histories.begin_step()
        for source in sources:  # current scales, then those of the first step
            given = (source, index.int()) if gathered else (source[index], None)
            copies = recipe.quantise(given[0], tiles, "input", rows=True, columns=True, index_R=given[1])
            end_step(histories, SOUND)
        found.append((copies, recipe.state()))
    (late, seen), (early, right) = found
    late_operand, early_operand = (TileOperand(tiles, None, *copies) for copies in (late, early))
    assert_same_bits(late_operand, early_operand)
    assert torch.equal(seen["input_maxima"], right["input_maxima"])
    assert seen["input_maxima"].any()
    assert torch.equal(seen["input_saturated"], right["input_saturated"])
    assert seen["input_saturated"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_tokens_keep_current_scales(name: str):
    layers, histories = layers_with(name)
    recipe = delayed_recipe(layers.up)
    x, rows = grouped_rows([130, 0, 7], seed=3)
    recipe.input(x, rows._replace(are_tokens=True))
    end_step(histories, SOUND)
    y, rows = grouped_rows([5, 5, 5], seed=4)
    tokens = rows._replace(are_tokens=True)
    assert_same_bits(recipe.input(y, tokens), current_recipe(name).input(y, tokens))
    assert not any(kind.startswith("input") for kind in recipe.state())


@pytest.mark.parametrize("name", NAMES)
def test_values_beyond_the_range_are_counted_and_clamped(name: str):
    layers, histories = layers_with(name)
    recipe = delayed_recipe(layers.dense)
    recipe.input(torch.full((40, INPUTS), 2.0), None)
    recipe.gradient(torch.ones(40, OUTPUTS), None)
    end_step(histories, SOUND)
    histories.begin_step()
    x = torch.full((40, INPUTS), -2.0)
    x[3, 4], x[5, 6], x[7, 8] = 3.0, -50.0, 2.05  # the last is nearest to the largest number
    operand = recipe.input(x, None)
    end_step(histories, SOUND)
    assert operand.rows is not None
    assert operand.rows.values[5, 6].float() == -448
    state = recipe.state()
    assert torch.equal(state["input_saturated"], torch.tensor([2 * 2])), "along rows and along columns"  # pyright: ignore[reportArgumentType]
    assert torch.equal(state["gradient_saturated"], torch.tensor([0]))  # pyright: ignore[reportArgumentType]


def test_passes_between_steps_and_steps_that_are_not_finite_leave_no_trace():
    layers, histories = layers_with("fp8_row")
    recipe = delayed_recipe(layers.dense)
    x, large = numbers(9, INPUTS, seed=1), numbers(9, INPUTS, seed=2) * 100
    recipe.input(x, None)
    end_step(histories, SOUND)
    before = recipe.input(x, None)
    recipe.input(large, None)  # validation
    histories.begin_step()
    recipe.input(x, None)
    end_step(histories, SOUND)
    assert_same_bits(recipe.input(x, None), before)
    recipe.input(large, None)
    end_step(histories, torch.tensor(False))
    assert_same_bits(recipe.input(x, None), before)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_shows_in_the_next_step(value: float):
    layers, histories = layers_with("fp8_tensor")
    recipe = delayed_recipe(layers.dense)
    x = numbers(9, INPUTS, seed=1)
    x[0, 0] = value
    recipe.input(x, None)
    end_step(histories, SOUND)
    by_row, by_column = scales(recipe.input(numbers(9, INPUTS, seed=1), None))
    assert by_row.isnan().all()
    assert by_column.isnan().all()


def test_state_is_listed_by_product_and_operand():
    layers, _ = layers_with("fp8_row")
    names = [name for name, _ in RecipeState(layers).named_state()]
    kinds = ("maxima", "saturated", "channel_maxima")
    both = [f"{role}_{kind}" for role in ("input", "gradient") for kind in kinds]
    alone = [f"gradient_{kind}" for kind in kinds]
    expected = [f"dense.{kind}" for kind in ("recorded_steps", *both)]
    expected += [f"up.{kind}" for kind in ("recorded_steps", *alone)]
    expected += [f"down.{kind}" for kind in ("recorded_steps", *both)]
    assert names == expected
