"""Adapters beside linear products: forward and gradients are those of the explicit weight W + s B A, which has no
gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefold.anatomy.adapters import AdapterSpec
from moefold.anatomy.products import ProductSpec
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product import PLAIN, Recipe
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import DeclaringModule
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.placement import sharded_over_experts
from moefold.layout.token_numbers import computing_tokens
from moefold.precision.linear import GroupedLinear, Linear, LinearGroup, PlacedWeight
from moefold.precision.low_rank import LowRankPair, attach_adapters, start_magnitudes
from moefold.train.assemble import default_dtype
from tests.precision.test_linear import numbers
from tests.support.toy_recipes import BlockScaledRecipe, RoundedRecipe

KERNELS = BoundKernels(Facts("cpu", "fp64", hidden=8, ffn=8))
SCALE = 0.75
ROWS = {"even": [4, 4, 4], "empty experts": [0, 12, 0], "skewed": [9, 0, 3], "no rows": [0, 0, 0]}


def spec(name: str, rank: int, dropout: float = 0.0) -> AdapterSpec:
    return AdapterSpec(ProductSpec("", name, 8, 8), rank, alpha=1.0, scale=SCALE, dropout=dropout)


class Projections(torch.nn.Module):
    """Two layers that read one input, one with gate and up, and one that reads another."""

    def __init__(self):
        super().__init__()
        world = single_rank_world()
        self.query = Linear(world, 8, 3, 4, bias=True, std=1.0)
        self.key = Linear(world, 8, 2, 5, std=1.0)
        self.out = Linear(world, 12, 8, std=1.0)
        self.both = LinearGroup(world, self.query, self.key)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = self.both(x)
        return q, k, self.out(q.flatten(-2))


class Stack(DeclaringModule):
    def __init__(self):
        super().__init__(single_rank_world())
        self.up = self.declare_parameter(
            "up", 3, 2, 6, 8, placement=sharded_over_experts(2), std=1.0, stacked=True, rows="gate_up"
        )
        weight = PlacedWeight(self.declared["up"], self.world)
        self.product = GroupedLinear(KERNELS, placed_weight=weight)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.up, ends)


def filled(module: torch.nn.Module, *adapters: AdapterSpec) -> None:
    attach_adapters(module, adapters, KERNELS)
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=i))


@pytest.mark.parametrize(("rank", "dropout"), [(1, 0.0), (4, 0.0), (4, 0.5)])
def test_magnitudes_scale_the_rows_of_the_explicit_sum(rank: int, dropout: float):
    """y = m (W x + s B A d(x)) / |W + s B A| + b by autograd, with a length that has no gradient; d drops."""
    with default_dtype(torch.float64):
        layers = Projections()
        filled(layers, *(replace(spec(name, rank, dropout), has_magnitude=True) for name in ("query", "out")))
    x = numbers(2, 5, 8, seed=90).requires_grad_()
    outputs = layers(x)
    directions = [numbers(*y.shape, seed=50 + i) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, directions)
    x2 = x.detach().clone().requires_grad_()
    leaves: dict[str, Tensor] = {}
    for name in ("query.lora", "out.lora"):
        for part in ("a", "b", "magnitude"):
            leaf = layers.get_parameter(f"{name}.{part}").detach().clone()
            leaves[f"{name}.{part}"] = leaf.requires_grad_()

    def directed(name: str, layer: Linear, rows: Tensor) -> Tensor:
        a, b, magnitude = (leaves[f"{name}.lora.{part}"] for part in ("a", "b", "magnitude"))
        weight = layer.weight.detach()
        factor = magnitude / (weight + SCALE * b @ a).detach().norm(dim=-1)
        assert isinstance(layer.lora, LowRankPair)
        mask = layer.lora.drop_inputs(torch.ones_like(rows))
        assert bool((mask == 0).any()) == bool(dropout)
        change = (SCALE * b @ a).flatten(0, -2)
        output = rows @ weight.flatten(0, -2).mT + (rows * mask) @ change.mT
        return output.unflatten(-1, weight.shape[:-1]) * factor

    assert layers.query.bias is not None
    q = directed("query", layers.query, x2) + layers.query.bias.detach()
    out = directed("out", layers.out, q.flatten(-2))
    torch.testing.assert_close(outputs[0], q, rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs[2], out, rtol=0, atol=1e-12)
    k = torch.einsum("bsd,hxd->bshx", x2, layers.key.weight.detach())
    torch.autograd.backward([q, k, out], directions)
    torch.testing.assert_close(x.grad, x2.grad, rtol=0, atol=1e-11)
    for name, leaf in leaves.items():
        torch.testing.assert_close(layers.get_parameter(name).grad, leaf.grad, rtol=0, atol=1e-11)
    # Lengths of rows: B of zero changes nothing once magnitudes have started.
    layers.query.lora.b.data.zero_()  # pyright: ignore
    before = torch.einsum("bsd,hxd->bshx", x, layers.query.weight) + layers.query.bias
    start_magnitudes(layers)
    torch.testing.assert_close(layers.query(x), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 4])
def test_linear_layers_compute_the_explicit_sum_and_its_gradients(rank: int):
    with default_dtype(torch.float64):
        layers = Projections()
        filled(layers, spec("query", rank), spec("out", rank))
    x = numbers(2, 5, 8, seed=90).requires_grad_()
    outputs = layers(x)
    # the same with explicit weights
    x2 = x.detach().clone().requires_grad_()
    explicit: dict[str, torch.Tensor] = {}
    for name in ("query", "key", "out"):
        layer = layers.get_submodule(name)
        weight = layer.weight.detach().flatten(0, -2)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        if isinstance(layer.lora, LowRankPair):
            b = layer.lora.b.detach().flatten(0, -2)
            weight = weight + SCALE * b @ layer.lora.a.detach()
        explicit[name] = weight.requires_grad_()
    q = (x2 @ explicit["query"].T + layers.query.bias.detach().flatten()).unflatten(-1, (3, 4))  # pyright: ignore
    k = (x2 @ explicit["key"].T).unflatten(-1, (2, 5))
    expected = (q, k, q.flatten(-2) @ explicit["out"].T)
    directions = [numbers(*y.shape, seed=50 + i) for i, y in enumerate(expected)]
    torch.autograd.backward(outputs, directions)
    torch.autograd.backward(expected, directions)
    close(list(outputs), list(expected))
    close([x.grad], [x2.grad])
    assert layers.query.weight.grad is None
    assert layers.key.weight.grad is None
    for name in ("query", "out"):
        pair = layers.get_submodule(f"{name}.lora")
        assert isinstance(pair, LowRankPair)
        dw = explicit[name].grad
        assert dw is not None
        b = pair.b.detach().flatten(0, -2)
        close([pair.a.grad], [SCALE * b.T @ dw])
        close([pair.b.grad], [(SCALE * dw @ pair.a.detach().T).view_as(pair.b)])


@pytest.mark.parametrize("make_recipe", [RoundedRecipe, BlockScaledRecipe])
def test_products_of_weights_keep_their_recipe_and_those_of_adapters_are_plain(make_recipe: Callable[[], Recipe]):
    """Outputs and input gradients are those of the recipe alone and those of s B A x; weights are frozen."""
    with default_dtype(torch.float64):
        adapted, alone = Projections(), Projections()
        filled(adapted, spec("query", 2), spec("out", 2))
    for layers in (adapted, alone):
        for name in ("query", "key", "out"):
            layer = layers.get_submodule(name)
            assert isinstance(layer, Linear)
            layer.use_recipe(make_recipe(), KERNELS)
            layer.weight.data.copy_(numbers(*layer.weight.shape, seed=len(name)))
    for number, name in enumerate(("query", "out")):
        adapted_layer, layer = adapted.get_submodule(name), alone.get_submodule(name)
        assert isinstance(layer, Linear)
        assert isinstance(adapted_layer, Linear)
        pair = adapted_layer.lora
        assert isinstance(pair, LowRankPair)
        layer.bias = adapted_layer.bias
        x = numbers(6, pair.a.shape[-1], seed=90 + number)
        x1, x2 = (x.clone().requires_grad_() for _ in range(2))
        b = pair.b.detach().flatten(0, -2)
        product = layer(x2)
        change = (SCALE * (x2 @ pair.a.detach().T) @ b.T).view_as(product)
        direction = numbers(*product.shape, seed=50)
        actual = adapted_layer(x1)
        actual.backward(direction)
        (product + change).backward(direction)
        close([actual, x1.grad], [product + change, x2.grad])
        dy = direction.flatten(1)
        close([pair.a.grad], [SCALE * b.T @ dy.T @ x])
        close([pair.b.grad], [(SCALE * dy.T @ x @ pair.a.detach().T).view_as(pair.b)])
        plain = torch.tensordot(x, layer.weight.detach().flatten(0, -2).T, dims=1).view_as(product)
        assert not torch.allclose(product, plain)


@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS.keys())
def test_experts_compute_the_explicit_sum_and_its_gradients(counts: list[int]):
    """Rows behind the last end are undefined and change nothing."""
    with default_dtype(torch.float64):
        stack = Stack()
        filled(stack, spec("product", 2))
    defined = sum(counts)
    x = numbers(defined + 2, 8, seed=90)
    x[defined:] = torch.nan
    x.requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    y = stack(x, ends)[:defined]
    pair = stack.product.lora
    assert isinstance(pair, LowRankPair)
    b = pair.b.detach().flatten(1, 2)
    change = SCALE * b @ pair.a.detach()
    weight = (stack.up.detach().flatten(1, 2) + change).requires_grad_()
    x2 = x.detach()[:defined].clone().requires_grad_()
    pieces = [rows @ w.T for rows, w in zip(x2.split(counts), weight, strict=True)]
    expected = torch.cat(pieces).unflatten(-1, (2, 6))
    direction = numbers(*expected.shape, seed=50)
    torch.autograd.backward([y], [direction])
    torch.autograd.backward([expected], [direction])
    close([y], [expected])
    assert x.grad is not None
    assert weight.grad is not None
    close([x.grad[:defined]], [x2.grad])
    assert stack.up.grad is None
    close([pair.a.grad], [SCALE * b.mT @ weight.grad])
    close([pair.b.grad], [(SCALE * weight.grad @ pair.a.detach().mT).view_as(pair.b)])


def close(actual: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_has_no_gradient_product():
    """Of three layers, two with adapters, the products with A and B alone are deferred: four."""
    with default_dtype(torch.float64):
        layers = Projections()
        filled(layers, spec("query", 2), spec("out", 2))
    queue: list[DeferredWork] = []
    outputs = layers(numbers(5, 8, seed=1))
    with deferring_weight_grads(queue):
        torch.autograd.backward([outputs[0].sum() + outputs[2].sum()])
    assert len(queue) == 4
    trained = {name for name, parameter in layers.named_parameters() if parameter.requires_grad}
    assert trained == {"query.lora.a", "query.lora.b", "out.lora.a", "out.lora.b"}


def test_without_adapters_nothing_is_frozen():
    layers = Projections()
    attach_adapters(layers, [], KERNELS)
    assert all(parameter.requires_grad for parameter in layers.parameters())
    assert layers.query.recipe is PLAIN


def dropped_to(layer: Linear) -> Tensor:
    """What the adapter of a layer makes of inputs that are all 1."""
    assert isinstance(layer.lora, LowRankPair)
    return layer.lora.drop_inputs(torch.ones(500, 8, dtype=torch.float64))


def test_dropout_leaves_a_share_of_inputs_in_training_alone_and_draws_by_token_and_product():
    share = 0.25
    with default_dtype(torch.float64):
        layers = Projections()
        filled(layers, spec("query", 2, share), spec("key", 2, share))
    mask = dropped_to(layers.query)
    assert set(mask.unique().tolist()) == {0.0, 1 / (1 - share)}
    assert abs(float((mask == 0).double().mean()) - share) < 0.03
    assert torch.equal(dropped_to(layers.query), mask)
    assert not torch.equal(dropped_to(layers.key), mask)
    with computing_tokens(lambda rows: torch.arange(rows) + 100):
        assert torch.equal(dropped_to(layers.query)[:-100], mask[100:])
    x = numbers(500, 8, seed=7)
    lora = layers.query.lora
    assert isinstance(lora, LowRankPair)
    base = layers.query(x) - lora(x)
    expected = (SCALE * (x * mask) @ lora.a.T @ lora.b.flatten(0, -2).T).unflatten(-1, (3, 4))
    close([layers.query(x) - base], [expected])
    layers.eval()
    assert torch.equal(dropped_to(layers.query), torch.ones_like(mask))
