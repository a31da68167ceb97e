"""A base in blocks: products are those of what the blocks stand for, forward and backward, and no more than a bounded
number of experts is dequantised at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.config.base_formats import BASE_FORMATS, BaseFormat
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import DeclaringModule, parameters_without_memory
from moefold.layout.held_blocks import held_blocks_of
from moefold.layout.placement import sharded_over_experts
from moefold.model.initialise import allocate_parameters
from moefold.precision.base_blocks import BaseBlocks, BlockProducts, BlockRecipe, empty_blocks, expert_runs, hold_base
from moefold.precision.linear import GroupedLinear, Linear, LinearGroup, PlacedWeight
from moefold.train.assemble import default_dtype
from tests.precision.test_linear import numbers

KERNELS = BoundKernels(Facts("cpu", "fp64", hidden=8, ffn=8))
FORMATS = list(BASE_FORMATS.values())
INPUTS = 136  # no multiple of a block
EXPERTS = 6
ROWS = {"even": [2] * 6, "empty experts": [0, 5, 0, 0, 3, 1], "one expert": [0, 0, 9, 0, 0, 0], "no rows": [0] * 6}


class Layers(DeclaringModule):
    """Two layers that read one input, and a stack of experts."""

    def __init__(self):
        super().__init__(single_rank_world())
        self.query = Linear(self.world, INPUTS, 3, 4, bias=True, std=1.0)
        self.key = Linear(self.world, INPUTS, 5, std=1.0)
        self.both = LinearGroup(self.world, self.query, self.key)
        shape = (EXPERTS, 2, 5, INPUTS)
        self.up = self.declare_parameter("up", *shape, placement=sharded_over_experts(2), std=1.0, stacked=True)
        self.product = GroupedLinear(KERNELS, placed_weight=PlacedWeight(self.declared["up"], self.world))


def held_layers(format: BaseFormat) -> Layers:
    with default_dtype(torch.float64):
        with parameters_without_memory():
            layers = Layers()
        hold_base(layers, format, ["query", "key", "product"], KERNELS)
        allocate_parameters(layers)
    for i, parameter in enumerate(layers.parameters()):
        (held_blocks_of(parameter) or parameter.data).copy_(numbers(*parameter.shape, seed=i))
    return layers.requires_grad_(False)


def blocks_of(parameter: torch.Tensor) -> BaseBlocks:
    blocks = held_blocks_of(parameter)
    assert isinstance(blocks, BaseBlocks)
    return blocks


def products_of(recipe: object) -> BlockProducts:
    assert isinstance(recipe, BlockRecipe)
    assert isinstance(recipe.products, BlockProducts)
    return recipe.products


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_dense_products_are_those_of_what_the_blocks_stand_for(format: BaseFormat):
    layers = held_layers(format)
    x = numbers(7, INPUTS, seed=20).requires_grad_()
    q, k = layers.both(x)
    x2 = x.detach().clone().requires_grad_()
    query = blocks_of(layers.query.weight).dequantised().flatten(0, 1)
    key = blocks_of(layers.key.weight).dequantised()
    assert layers.query.bias is not None
    expected_q = (x2 @ query.T + layers.query.bias.flatten()).unflatten(-1, (3, 4))
    expected_k = x2 @ key.T
    assert float((key - numbers(*key.shape, seed=2)).abs().max()) > 1e-3  # rounding there is
    torch.autograd.backward([q, k], [torch.sin(q.detach()), torch.sin(k.detach())])
    torch.autograd.backward([expected_q, expected_k], [torch.sin(q.detach()), torch.sin(k.detach())])
    torch.testing.assert_close([q, k, x.grad], [expected_q, expected_k, x2.grad], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most", [0, 2 * 10 * INPUTS, 1 << 24])
@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS.keys())
def test_experts_are_multiplied_some_at_a_time(counts: list[int], most: int):
    """Rows behind the last end are undefined and change nothing."""
    layers = held_layers(BASE_FORMATS["nf4"])
    products_of(layers.product.recipe).most = most
    defined = sum(counts)
    x = numbers(defined + 2, INPUTS, seed=20)
    x[defined:] = torch.nan
    x.requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    y = layers.product(x, layers.up, ends)[:defined]
    w = blocks_of(layers.up).dequantised().flatten(1, 2)
    x2 = x.detach()[:defined].clone().requires_grad_()
    pieces = [rows @ matrix.T for rows, matrix in zip(x2.split(counts), w, strict=True)]
    expected = torch.cat(pieces).unflatten(-1, (2, 5))
    direction = numbers(*expected.shape, seed=50)
    torch.autograd.backward([y], [direction])
    torch.autograd.backward([expected], [direction])
    assert x.grad is not None
    torch.testing.assert_close([y, x.grad[:defined]], [expected, x2.grad], rtol=1e-12, atol=1e-12)


def test_runs_of_experts_cover_all_rows_once():
    runs = list(expert_runs([3, 0, 1, 2, 4, 0], most=2))
    assert runs == [(slice(0, 1), slice(0, 3)), (slice(2, 4), slice(3, 6)), (slice(4, 5), slice(6, 10))]
    assert list(expert_runs([0, 0], most=2)) == []


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that any operation gives."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_memory_is_that_of_blocks_and_of_few_matrices(format: BaseFormat):
    """Neither forward nor backward has a tensor of more than two experts; parameters have no memory of their own."""
    layers = held_layers(format)
    blocks = blocks_of(layers.up)
    assert layers.up.untyped_storage().nbytes() == 8
    assert blocks.nbytes == EXPERTS * 10 * format.row_bytes(INPUTS, 8)
    matrix = 10 * format.blocks(INPUTS) * format.block  # with what fills the last block
    products_of(layers.product.recipe).most = 2 * 10 * INPUTS
    x = numbers(6, INPUTS, seed=20).requires_grad_()
    ends = torch.arange(1, 7).int()
    with LargestTensor() as seen:
        layers.product(x, layers.up, ends).sum().backward()
    assert matrix < seen.most <= 2 * matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_blocks_stand_for_is_held_as_it_is(format: BaseFormat, dtype: torch.dtype):
    """So a run that loads what it saved has the same base. Largest magnitudes of bf16 weights are kept in two bytes."""
    weight = numbers(4, 3, INPUTS, seed=1).to(dtype)
    blocks = empty_blocks(weight, format)
    blocks.copy_(weight)
    values = blocks.dequantised()
    assert values.dtype == dtype
    assert not torch.equal(values, weight)
    blocks.copy_(torch.zeros(()))
    assert not blocks.dequantised().any()
    for i, part in enumerate(blocks.unbind()):
        part.copy_(values[i])
    assert torch.equal(blocks.dequantised(), values)
    window = blocks[slice(1, 3), slice(0, 1), slice(None)]
    assert torch.equal(window.dequantised(), values[1:3, :1])
    with pytest.raises(AssertionError, match="whole rows"):
        blocks[slice(1, 3), slice(0, 1), slice(0, 64)]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_fused_kernel_gets_even_ranges_of_experts_within_the_bound(
    format: BaseFormat, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moefold.precision.base_blocks.MOST_VALUES", 4 * 10 * INPUTS)
    layers = held_layers(format)
    recipe = layers.product.recipe
    assert isinstance(recipe, BlockRecipe)
    held = recipe.held_experts(layers.up)
    assert held.shape == layers.up.shape
    assert held.experts == 3  # of six, where four would fit
    whole = blocks_of(layers.up).dequantised()
    assert torch.equal(held.load(slice(2, 5)), whole[2:5])
