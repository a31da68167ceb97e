"""MXFP8 and NVFP4 recipes on dense and grouped layers: products of what the stored operands stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.cli.explain import EVERY_MICRO_OP
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig, PrecisionConfig, TrainConfig
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.linear import grouped_linear, linear
from moefold.kernels.linear.product import PLAIN, ExpertRows, Recipe
from moefold.kernels.quantise.hadamard import random_hadamard
from moefold.kernels.quantise.mxfp8 import dequantise_mxfp8, quantise_mxfp8
from moefold.kernels.quantise.nvfp4 import dequantise_nvfp4, quantise_nvfp4, quantise_nvfp4_squares
from moefold.kernels.registry import KernelOp
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import Declaration
from moefold.layout.placement import REPLICATED, sharded_over_experts
from moefold.layout.token_numbers import computing_tokens
from moefold.precision.linear import PlacedWeight
from moefold.precision.micro_products import MicroOperand
from moefold.precision.microscaling import MicroscalingRecipe
from tests.support.fp8_interpreter import convert_by_torch
from tests.support.ranks import run_ranks

KERNELS = BoundKernels(Facts("cpu", "fp32"))
WORLD = single_rank_world("cpu")
# Of the norm. Two operands are rounded: in E4M3 by 2.6 % on average each, in E2M1 by 10 %, stochastically by 14 %.
BOUND = {"mxfp8": 0.04, "nvfp4": 0.2}


def recipe_of(
    name: str, *shape: int, stacked: bool = False, kernels: BoundKernels = KERNELS, world: World = WORLD, **options: Any
) -> MicroscalingRecipe:
    placement = sharded_over_experts(1) if stacked else REPLICATED
    weight = PlacedWeight(Declaration(shape, placement, 1.0, stacked), world)
    return MicroscalingRecipe(RECIPE_SPECS[name], replace(PrecisionConfig(), **options), kernels, "layer", weight)


class MicroKernelsInTriton(BoundKernels):
    def implementation_name(self, op: KernelOp[..., Any]) -> str:
        return "triton" if op.name in EVERY_MICRO_OP else super().implementation_name(op)


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def dense_results(recipe: Recipe, rows: int = 200) -> list[torch.Tensor]:
    """y, dx and dW of a layer whose sizes fill no block."""
    x = numbers(rows, 80, seed=1).requires_grad_()
    weight = numbers(112, 80, seed=2, scale=1 / 8).requires_grad_()
    (y,) = linear(x, [(weight, None)], recipe)
    y.backward(numbers(rows, 112, seed=9))
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def grouped_results(recipe: Recipe, counts: list[int], behind: int = 0) -> list[torch.Tensor]:
    """y, dx and dW of experts with so many rows, and some rows that belong to none."""
    rows = sum(counts)
    x = numbers(rows + behind, 64, seed=1)
    x[rows:] = torch.inf
    x.requires_grad_()
    weight = numbers(len(counts), 96, 64, seed=2, scale=1 / 8).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    y = grouped_linear(x, weight, ends, recipe)
    dy = numbers(rows + behind, 96, seed=9)
    y[:rows].backward(dy[:rows])
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach()[:rows], x.grad[:rows], weight.grad]


@pytest.mark.parametrize("name", BOUND)
def test_a_dense_layer_is_near_the_plain_one(name: str):
    for mine, right in zip(dense_results(recipe_of(name, 112, 80)), dense_results(PLAIN), strict=True):
        assert 0 < error(mine, right) < BOUND[name]


def test_a_layer_that_has_generated_is_trained_with_as_many_rows():
    recipe = recipe_of("mxfp8", 112, 80)
    x, weight = numbers(77, 80, seed=1), numbers(112, 80, seed=2)
    with torch.inference_mode():
        linear(x, [(weight, None)], recipe)
    assert all(result.isfinite().all() for result in dense_results(recipe, rows=77))


COUNTS = {"skewed": [1, 70, 0, 33], "one expert": [0, 90, 0], "whole blocks": [32, 64], "odd": [5, 7, 3]}


@pytest.mark.parametrize("behind", [0, 9])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", BOUND)
def test_experts_are_near_plain_ones(name: str, counts: str, behind: int):
    rows = COUNTS[counts]
    recipe = recipe_of(name, len(rows), 96, 64, stacked=True)
    found = grouped_results(recipe, rows, behind)
    for mine, right in zip(found, grouped_results(PLAIN, rows), strict=True):
        assert mine.isfinite().all()
        assert 0 < error(mine, right) < 1.5 * BOUND[name]
    empty = [expert for expert, count in enumerate(rows) if count == 0]
    assert (found[2][empty] == 0).all()


@pytest.mark.parametrize("name", BOUND)
def test_an_expert_has_scales_of_its_own(name: str):
    """Also where another expert has much larger rows: its results are those of the expert alone."""
    recipe = recipe_of(name, 2, 96, 64, stacked=True, stochastic=name == "mxfp8")
    weight = numbers(2, 96, 64, seed=2)
    x = numbers(80, 64, seed=3)
    x[40:] *= 1000
    both = grouped_linear(x, weight, torch.tensor([40, 80], dtype=torch.int32), recipe)
    alone = recipe_of(name, 1, 96, 64, stacked=True, stochastic=name == "mxfp8")
    first = grouped_linear(x[:40], weight[:1].clone(), torch.tensor([40], dtype=torch.int32), alone)
    assert torch.equal(both[:40], first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of this test are on the CPU")
@pytest.mark.parametrize("name", BOUND)
def test_kernels_in_triton_change_no_bit_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    triton = MicroKernelsInTriton(Facts("cpu", "fp32"))
    mine = recipe_of(name, 2, 96, 64, stacked=True, kernels=triton)
    right = recipe_of(name, 2, 96, 64, stacked=True)
    for a, b in zip(grouped_results(mine, [5, 3], 2), grouped_results(right, [5, 3], 2), strict=True):
        assert torch.equal(a, b)


def test_mxfp8_products_are_those_of_dequantised_operands():
    x, weight, dy = numbers(64, 96, seed=1), numbers(32, 96, seed=2), numbers(64, 32, seed=3)
    recipe = recipe_of("mxfp8", 32, 96)
    leaf, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = linear(leaf, [(matrix, None)], recipe)
    y.backward(dy)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return dequantise_mxfp8(quantise_mxfp8(t.contiguous())).double()

    assert leaf.grad is not None
    assert matrix.grad is not None
    assert error(y, rounded(x) @ rounded(weight).T) < 1e-6
    assert error(leaf.grad, rounded(dy) @ rounded(weight.T).T) < 1e-6
    assert error(matrix.grad, rounded(dy.T) @ rounded(x.T).T) < 1e-6


def test_nvfp4_products_are_those_of_dequantised_operands():
    x, weight, dy = numbers(64, 96, seed=1), numbers(32, 96, seed=2), numbers(64, 32, seed=3)
    recipe = recipe_of("nvfp4", 32, 96, stochastic=False)
    leaf, matrix = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = linear(leaf, [(matrix, None)], recipe)
    y.backward(dy)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return dequantise_nvfp4(quantise_nvfp4(t, t.abs().max().view(1, 1))).double()

    def transformed(t: torch.Tensor) -> torch.Tensor:
        return rounded(random_hadamard(t.contiguous()))

    squares = dequantise_nvfp4(quantise_nvfp4_squares(weight)).double()
    assert leaf.grad is not None
    assert matrix.grad is not None
    assert error(y, rounded(x) @ squares.T) < 1e-6
    assert error(leaf.grad, rounded(dy) @ squares) < 1e-6
    assert error(matrix.grad, transformed(dy.T) @ transformed(x.T).T) < 1e-6


def test_options_change_what_they_name():
    base = dense_results(recipe_of("nvfp4", 112, 80, stochastic=False))
    without = dense_results(recipe_of("nvfp4", 112, 80, stochastic=False, hadamard=False))
    rows = dense_results(recipe_of("nvfp4", 112, 80, stochastic=False, weight_blocks="rows"))
    random = dense_results(recipe_of("nvfp4", 112, 80))
    assert [torch.equal(a, b) for a, b in zip(base, without, strict=True)] == [True, True, False]
    assert [torch.equal(a, b) for a, b in zip(base, rows, strict=True)] == [False, False, True]
    assert [torch.equal(a, b) for a, b in zip(base, random, strict=True)] == [True, False, False]
    up = dense_results(recipe_of("mxfp8", 112, 80))
    down = dense_results(recipe_of("mxfp8", 112, 80, scale_rounding="down"))
    assert not torch.equal(up[0], down[0])


def test_forward_keeps_the_packed_columns_alone():
    kept: list[torch.Tensor] = []
    x = numbers(64, 128, seed=1).requires_grad_()
    weight = numbers(32, 128, seed=2).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, [(weight, None)], recipe_of("nvfp4", 32, 128))
    values = [t for t in kept if t.dtype in (torch.uint8, torch.float8_e4m3fn)]
    assert sum(t.nbytes for t in values) == 64 * 128 * 4.5 / 8
    assert not any(t.is_floating_point() and t.numel() >= x.numel() for t in kept)


def test_stochastic_gradients_depend_on_the_tokens_numbers_alone():
    recipe = recipe_of("nvfp4", 48, 32)
    dy = numbers(40, 48, seed=4)
    order = torch.randperm(40)

    def row_copy(numbers_R: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        operand = recipe.gradient(rows, None, numbers_R)
        assert operand.rows is not None
        return operand.rows.values

    number_R = torch.arange(1000, 1040)
    there = row_copy(number_R, dy)
    assert torch.equal(row_copy(number_R[order], dy[order]), there[order])
    assert not torch.equal(row_copy(number_R + 40, dy), there)
    with computing_tokens(lambda rows: torch.arange(rows) + 7):
        seven = dense_results(recipe_of("nvfp4", 112, 80))
    again = dense_results(recipe_of("nvfp4", 112, 80))
    assert torch.equal(seven[0], again[0])
    assert not torch.equal(seven[1], again[1])


def test_outputs_that_share_no_random_numbers_with_their_neighbours_are_refused():
    with pytest.raises(ValueError, match="groups of 4"):
        recipe_of("nvfp4", 18, 96)
    recipe_of("nvfp4", 18, 96, stochastic=False)


def test_stochastic_gradients_are_right_in_the_mean():
    dy = numbers(16, 48, seed=4)
    ends = torch.tensor([16], dtype=torch.int32)
    recipe = recipe_of("nvfp4", 48, 32)
    total = torch.zeros(16, 48)
    draws = 400
    for draw in range(draws):
        operand = recipe.gradient(dy, ExpertRows(ends), torch.arange(16) + 16 * draw)
        assert operand.rows is not None
        values = recipe.format.exact_values(operand.rows, torch.float32)
        assert operand.rows.encode is not None
        total += values / operand.rows.encode
    assert error(total / draws, dy) < 0.015


EXPERTS, TOKENS, CHOICES = 8, 24, 2
Copies = dict[str, list[torch.Tensor]]  # by operand and expert: values and scales of its row copy and column copy


def copies_of_experts(world: World, dispatcher: Dispatcher, ranks: range, name: str) -> list[Copies]:
    """Of each expert here: copies of its rows as an input, and as a gradient with the tokens' numbers."""
    tokens = torch.cat([numbers(TOKENS, 64, seed=10 + rank) for rank in ranks])
    ids = torch.cat([numbers(TOKENS, EXPERTS, seed=20 + rank).topk(CHOICES).indices for rank in ranks])
    number_T = torch.arange(TOKENS) + torch.tensor(ranks)[:, None] * TOKENS
    receipt = dispatcher.plan(Routing(torch.ones(ids.shape), ids))
    order = receipt.order
    index = order.index_R.long()
    x = dispatcher.dispatch(tokens, receipt).source_ND[index]
    number_R = dispatcher.dispatch(number_T.view(-1, 1).float(), receipt).source_ND[index]
    recipe = recipe_of(name, EXPERTS, 64, 64, stacked=True, world=world)
    rows = ExpertRows(order.ends_e)
    operands = {"input": recipe.input(x, rows), "gradient": recipe.gradient(x, rows, number_R.flatten().long())}
    return [{what: of_expert(operand, e) for what, operand in operands.items()} for e in range(len(order.ends_e))]


def of_expert(operand: MicroOperand, e: int) -> list[torch.Tensor]:
    """Numbers of the row copy and of the column copy, and the scales of the matrix where the format has them."""
    assert operand.rows is not None
    rows, columns = operand.rows, operand.columns
    height = 2 * columns.values.shape[-1] if columns.encode is not None else columns.values.shape[-1]
    begin, padded_begin = (int(ends[e - 1]) if e else 0 for ends in (operand.ends_E, operand.padded_ends_E))
    mine = slice(begin, int(operand.ends_E[e]))
    blocks = slice(padded_begin // height, int(operand.padded_ends_E[e]) // height)
    parts = [rows.values[mine], columns.values[blocks], columns.block_scales[blocks]]
    if rows.scales is not None:
        parts.append(rows.scales[mine])
    if rows.encode is not None and columns.encode is not None:
        parts += [rows.encode[mine], columns.encode[e]]
    return [part.contiguous().view(torch.uint8) for part in parts]


def copies_on_rank(world: World) -> dict[str, list[Copies]]:
    """Through a dispatcher that keeps the order of an expert's rows."""
    model = ModelConfig(hidden=64, moe=MoeConfig(experts=EXPERTS, ffn=64, top_k=CHOICES))
    parallel = ParallelConfig(ep=world.ep.size, dispatcher="all_to_all")
    config = Config(model=model, parallel=parallel, train=TrainConfig(precision="fp32"))
    dispatcher = build_dispatcher(config, KERNELS, world)
    here = range(world.rank, world.rank + 1)
    return {name: copies_of_experts(world, dispatcher, here, name) for name in BOUND}


def test_copies_of_experts_rows_on_four_ranks_are_those_of_one_rank_to_the_bit():
    """Row copies, random numbers and the scales of experts; column copies too, since the blocks hold the same rows."""
    on_four = run_ranks(copies_on_rank, 4, ep=4)
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
    for name in BOUND:
        whole = copies_of_experts(WORLD, local, range(4), name)
        found = [copies for rank in on_four for copies in rank[name]]
        for mine, right in zip(found, whole, strict=True):
            for what in ("input", "gradient"):
                assert all(map(torch.equal, mine[what], right[what])), f"{name}: {what}"
