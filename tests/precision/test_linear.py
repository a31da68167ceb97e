"""Linear, LinearGroup and GroupedLinear under any recipe: forward and gradients are those that autograd has of the
operands, whether the weight gradient is computed at once or later, and wherever it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.linear import linear
from moefold.kernels.linear.product import PLAIN, Recipe
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.gradient_sink import attach_gradient_sink
from moefold.precision.linear import GroupedLinear, Linear, LinearGroup
from moefold.train.assemble import default_dtype
from tests.support.toy_recipes import BlockScaledRecipe, DelayedScaleRecipe, RoundedRecipe

KERNELS = BoundKernels(Facts("cpu", "fp64", hidden=8, ffn=8))
RECIPES: dict[str, Callable[[], Any]] = {
    "plain": lambda: PLAIN,
    "rounded": RoundedRecipe,
    "scaled, columns kept": BlockScaledRecipe,
    "scaled, both kept": lambda: BlockScaledRecipe("both"),
    "delayed scale": DelayedScaleRecipe,
}
PRODUCTS = {"reference": linear.reference, "fused_dgrad": linear.implementations["fused_dgrad"]}
Gradients = dict[str, torch.Tensor]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_linear(recipe: Recipe, products: str, *outputs: int, bias: bool, seed: int) -> Linear:
    with default_dtype(torch.float64):
        layer = Linear(single_rank_world(), 8, *outputs, bias=bias, std=1.0)
    for i, parameter in enumerate(declared_parameters(layer)):
        parameter.tensor.data.copy_(numbers(*parameter.tensor.shape, seed=seed + i))
    layer.recipe, layer.multiply_layers = recipe, PRODUCTS[products]
    return layer


def run_backward(outputs: list[torch.Tensor], later: bool) -> int:
    """Backward of all outputs; returns how many weight gradients were deferred."""
    directions = [numbers(*y.shape, seed=50 + i) for i, y in enumerate(outputs)]
    queue: list[DeferredWork] = []
    if not later:
        torch.autograd.backward(outputs, directions)
        return 0
    with deferring_weight_grads(queue):
        torch.autograd.backward(outputs, directions)
    for work in queue:
        work()
    return len(queue)


def expected_gradients(recipe: Recipe, x: torch.Tensor, layer: Linear, number: int) -> tuple[torch.Tensor, ...]:
    """y, dx, dW and db of one layer from the operands, in three formulas."""
    weight, bias = layer.weight_and_bias()
    rows = x.flatten(0, -2)
    operand, w = recipe.input(rows, None), recipe.weight(weight).dequantised()
    dy = numbers(*x.shape[:-1], *layer.weight.shape[:-1], seed=50 + number).reshape(len(rows), -1)
    d = recipe.gradient(dy, None)
    kept = operand if recipe.keeps == "rows" else operand.along_columns()
    y = operand.dequantised() @ w.T + (0 if bias is None else bias)
    d_weight = d.along_columns().dequantised().T @ kept.dequantised()
    return y, d.dequantised() @ w, d_weight, dy.sum(0)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_of_layers_has_the_gradients_of_its_operands(recipe: str, products: str, sink: bool, later: bool):
    made = RECIPES[recipe]()
    shapes = [((2, 6), True), ((4,), False), ((3, 2, 2), True)]
    layers = [make_linear(made, products, *outputs, bias=bias, seed=10 * i) for i, (outputs, bias) in enumerate(shapes)]
    places = [torch.full((layer.weight.numel(),), torch.nan, dtype=torch.float64) for layer in layers]
    for layer, place in zip(layers, places, strict=True):
        if sink:
            attach_gradient_sink(layer.weight, lambda dtype, place=place: place, lambda: None)
    x = numbers(2, 3, 8, seed=99).requires_grad_()
    outputs = LinearGroup(single_rank_world(), *layers)(x)
    deferred = run_backward(outputs, later)
    assert deferred == (len(layers) if later else 0)
    total = torch.zeros(6, 8, dtype=torch.float64)
    for number, (layer, y, place) in enumerate(zip(layers, outputs, places, strict=True)):
        right_y, dx, d_weight, d_bias = expected_gradients(made, x.detach(), layer, number)
        total += dx
        assert layer.weight.grad is not None
        torch.testing.assert_close(y.detach().reshape(6, -1), right_y)
        torch.testing.assert_close(layer.weight.grad.reshape(d_weight.shape), d_weight)
        if layer.bias is not None:
            torch.testing.assert_close(layer.bias.grad.flatten(), d_bias)  # pyright: ignore[reportOptionalMemberAccess]
        if sink and products == "fused_dgrad":
            assert torch.equal(place.view(d_weight.shape), layer.weight.grad.reshape(d_weight.shape)), "in its place"
    torch.testing.assert_close(x.grad.reshape(6, 8), total)  # pyright: ignore[reportOptionalMemberAccess]


def test_plain_gradients_are_those_of_autograd():
    layers = [make_linear(PLAIN, "fused_dgrad", 5, bias=i == 0, seed=10 * i) for i in range(3)]
    x = numbers(7, 8, seed=1).requires_grad_()
    mine = LinearGroup(single_rank_world(), *layers)(x)
    right = [torch.nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    directions = [numbers(7, 5, seed=i) for i in range(3)]
    for a, b in zip(
        torch.autograd.grad(mine, leaves, directions), torch.autograd.grad(right, leaves, directions), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_layers_of_a_group_with_different_recipes_run_by_themselves():
    recipes = [PLAIN, RoundedRecipe()]
    layers = [make_linear(recipe, "fused_dgrad", 5, bias=False, seed=i) for i, recipe in enumerate(recipes)]
    x = numbers(4, 8, seed=9)
    for y, layer in zip(LinearGroup(single_rank_world(), *layers)(x), layers, strict=True):
        torch.testing.assert_close(y, layer(x))
    assert not torch.equal(layers[1](x), torch.nn.functional.linear(x, layers[1].weight))


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_grouped_layer_is_each_experts_own_layer(recipe: str, later: bool):
    """Blocks of rows do not cross experts: their ends are multiples of the recipe's."""
    counts = [4, 0, 6, 2]
    ends = torch.tensor(counts).cumsum(0).int()
    made = RECIPES[recipe]()
    assert all(count % made.row_multiple == 0 for count in counts)
    layer = GroupedLinear(KERNELS)
    layer.use_recipe(made, KERNELS)
    x = numbers(sum(counts), 8, seed=1).requires_grad_()
    weight = numbers(len(counts), 2, 3, 8, seed=2).requires_grad_()
    y = layer(x, weight, ends)
    assert y.shape == (sum(counts), 2, 3)
    assert run_backward([y], later) == later
    dy = numbers(*y.shape, seed=50).flatten(1)
    operand, d = made.input(x.detach(), None), made.gradient(dy, None)
    kept = (operand if made.keeps == "rows" else operand.along_columns()).dequantised()
    matrices = made.weight(weight.flatten(1, 2)).dequantised()
    for e, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        mine = slice(end - count, end)
        torch.testing.assert_close(y.detach().flatten(1)[mine], operand.dequantised()[mine] @ matrices[e].T)
        torch.testing.assert_close(x.grad[mine], d.dequantised()[mine] @ matrices[e])  # pyright: ignore[reportOptionalSubscript]
        right = d.along_columns().dequantised()[mine].T @ kept[mine]
        torch.testing.assert_close(weight.grad[e].flatten(0, 1), right)  # pyright: ignore[reportOptionalSubscript]


def test_a_frozen_weight_gets_no_gradient_and_its_input_is_not_kept():
    layer = make_linear(PLAIN, "fused_dgrad", 5, bias=True, seed=0)
    layer.weight.requires_grad_(False)
    kept: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    x = numbers(4, 8, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = layer(x)
    assert not kept
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None  # pyright: ignore[reportOptionalMemberAccess]
    assert x.grad is not None
