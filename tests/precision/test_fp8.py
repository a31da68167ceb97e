"""FP8 recipes on dense and grouped layers: near plain within stated bounds, experts apart, weights quantised once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.linear import grouped_linear, linear
from moefold.kernels.linear.product import PLAIN, ExpertRows, Recipe
from moefold.kernels.quantise.fp8 import E5M2
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.gradient_sink import attach_gradient_sink
from moefold.layout.weight_copies import count_change
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import GroupedLinear

KERNELS = BoundKernels(Facts("cpu", "fp32", hidden=256, ffn=256))
FP8 = [name for name, spec in RECIPE_SPECS.items() if spec.format == "fp8"]
# Largest |a - b| / |b| against plain products in fp32. E4M3 rounds by up to 1/16, 2.6 % on average, and a product has
# two rounded operands; E5M2 gradients round by up to 1/8.
BOUND = 0.04
E5M2_BOUND = 0.065


def recipe_of(name: str, **options: Any) -> Fp8Recipe:
    return Fp8Recipe(RECIPE_SPECS[name], replace(PrecisionConfig(), **options), KERNELS)


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def dense_results(recipe: Recipe, later: bool = False) -> list[torch.Tensor]:
    """y, dx and dW of a layer whose sizes fill no block."""
    x = numbers(5, 40, 272, seed=1).requires_grad_()
    weight = numbers(336, 272, seed=2, scale=1 / 16).requires_grad_()
    bias = numbers(336, seed=3).requires_grad_()
    (y,) = linear(x, [(weight, bias)], recipe)
    run_backward(y, later)
    return [y.detach(), *(t.grad for t in (x, weight, bias) if t.grad is not None)]


def run_backward(y: torch.Tensor, later: bool) -> None:
    dy = numbers(*y.shape, seed=9)
    queue: list[DeferredWork] = []
    if not later:
        y.backward(dy)
        return
    with deferring_weight_grads(queue):
        y.backward(dy)
    assert len(queue) == 1
    queue[0]()


@pytest.mark.parametrize("options", [{}, {"power_of_two_scales": True}, {"gradient_format": "e5m2"}], ids=str)
@pytest.mark.parametrize("name", FP8)
def test_a_dense_layer_is_near_plain_forward_and_backward(name: str, options: dict[str, Any]):
    plain = dense_results(PLAIN)
    mine = dense_results(recipe_of(name, **options))
    of_gradients = E5M2_BOUND if options.get("gradient_format") == "e5m2" else BOUND
    for value, right, bound in zip(mine, plain, [BOUND, of_gradients, of_gradients, 1e-6], strict=True):
        assert value.shape == right.shape
        assert value.dtype == right.dtype
        assert error(value, right) < bound
    assert error(mine[0], plain[0]) > 0.01, "operands are FP8"


def test_the_weight_gradient_of_hybrid_is_the_plain_one_to_the_bit():
    assert torch.equal(dense_results(recipe_of("fp8_hybrid"))[2], dense_results(PLAIN)[2])


COUNTS = [150, 0, 3, 128, 0]


def grouped_results(recipe: Recipe, later: bool = False, tokens: bool = False, rows: int = sum(COUNTS)) -> Any:
    """y, dx and dW; rows behind the last end are NaN."""
    ends = torch.tensor(COUNTS).cumsum(0).int()
    x = numbers(rows, 160, seed=4)
    x[sum(COUNTS) :] = torch.nan
    x.requires_grad_()
    weight = numbers(len(COUNTS), 176, 160, seed=5, scale=0.1).requires_grad_()
    y = grouped_linear(x, weight, ends, recipe, are_tokens=tokens)
    run_backward(y, later)
    return [y.detach()[: sum(COUNTS)], x.grad[: sum(COUNTS)], weight.grad]  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("name", FP8)
def test_a_grouped_layer_is_near_plain_and_blind_to_undefined_rows(name: str):
    plain, mine = grouped_results(PLAIN), grouped_results(recipe_of(name))
    for value, right in zip(mine, plain, strict=True):
        assert error(value, right) < BOUND
    assert not mine[2][[1, 4]].any(), "experts without rows"
    for value, right in zip(grouped_results(recipe_of(name), rows=400), mine, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "fp8_row"])
def test_an_expert_has_the_numbers_of_a_dense_layer_of_its_own(name: str):
    recipe = recipe_of(name)
    y, dx, dw = grouped_results(recipe)
    x, weight = numbers(sum(COUNTS), 160, seed=4), numbers(len(COUNTS), 176, 160, seed=5, scale=0.1)
    dy = numbers(*y.shape, seed=9)
    first = 0
    for e, count in enumerate(COUNTS):
        mine = slice(first, first + count)
        first += count
        rows, matrix = x[mine].clone().requires_grad_(), weight[e].clone().requires_grad_()
        (alone,) = linear(rows, [(matrix, None)], recipe)
        alone.backward(dy[mine])
        for value, right in ((y[mine], alone), (dx[mine], rows.grad), (dw[e], matrix.grad)):
            assert torch.equal(value, right)


def test_tokens_of_one_scale_per_tensor_share_it_over_all_experts():
    recipe = recipe_of("fp8_tensor")
    x = numbers(sum(COUNTS), 160, seed=4) * torch.arange(1, sum(COUNTS) + 1)[:, None]
    ends = torch.tensor(COUNTS).cumsum(0).int()
    used = recipe.input(x, ExpertRows(ends)).tiles.tiles_M4[:, 2] > 0
    for tokens, scales in ((False, 3), (True, 1)):
        operand = recipe.input(x, ExpertRows(ends, tokens))
        assert operand.rows is not None
        by_tile = operand.rows.scales.view(-1, 128)
        assert (by_tile == by_tile[:, :1]).all()
        assert len(by_tile[used, 0].unique()) == scales
    assert GroupedLinear(KERNELS, reads_tokens=True).reads_tokens


@pytest.mark.parametrize("name", FP8)
def test_a_deferred_weight_gradient_and_a_second_run_have_the_same_bits(name: str):
    recipe = recipe_of(name)
    for results in (dense_results, grouped_results):
        first = results(recipe)
        for other in (results(recipe, later=True), results(recipe)):
            for a, b in zip(first, other, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", FP8)
def test_a_layer_without_any_row_has_zero_gradients(name: str):
    ends = torch.zeros(2, dtype=torch.int32)
    x = torch.zeros(0, 32, requires_grad=True)
    weight = numbers(2, 48, 32, seed=1).requires_grad_()
    y = grouped_linear(x, weight, ends, recipe_of(name))
    run_backward(y, later=False)
    assert y.shape == (0, 48)
    assert weight.grad is not None
    assert not weight.grad.any()


def saved_bytes(recipe: Recipe, dtype: torch.dtype) -> tuple[int, list[torch.Tensor]]:
    """Of the tensors that forward saves of a 512 x 256 input; index tensors of tiles are a few hundred bytes."""
    kept: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    x = numbers(512, 256, seed=1).to(dtype)
    weight = numbers(256, 256, seed=2).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        linear(x, [(weight, None)], recipe)
    floats = [t for t in kept if t.is_floating_point()]
    return sum(t.nbytes for t in floats), floats


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "fp8_row"])
def test_forward_saves_the_copy_along_columns_about_half_of_bf16(name: str):
    plain, _ = saved_bytes(PLAIN, torch.bfloat16)
    mine, kept = saved_bytes(recipe_of(name), torch.bfloat16)
    assert kept[0].dtype == torch.float8_e4m3fn
    assert mine < 0.65 * plain  # 512 rows are five tiles, the last without rows


def test_forward_of_hybrid_saves_the_input_itself():
    plain, _ = saved_bytes(PLAIN, torch.bfloat16)
    mine, kept = saved_bytes(recipe_of("fp8_hybrid"), torch.bfloat16)
    assert mine == plain
    assert [t.dtype for t in kept] == [torch.bfloat16]


class CountedRecipe(Fp8Recipe):
    """Counts how often weights are quantised."""

    count = 0

    def quantise_matrices(self, w: torch.Tensor) -> Any:
        self.count += 1
        return super().quantise_matrices(w)


def test_a_weight_is_quantised_once_until_it_moves():
    recipe = CountedRecipe(RECIPE_SPECS["fp8_block"], PrecisionConfig(), KERNELS)
    weight = torch.nn.Parameter(numbers(2, 24, 32, seed=1))
    x = numbers(6, 32, seed=2).requires_grad_()

    def run() -> torch.Tensor:
        (y,) = linear(x, [(weight.flatten(0, 1), None)], recipe)
        y.sum().backward()
        return y.detach()

    first = run()
    run()
    assert recipe.count == 1, "two microbatches, forward and backward"
    with torch.no_grad():
        weight.mul_(2)  # torch counts this
    assert not torch.equal(run(), first)
    assert recipe.count == 2
    weight.data[0] = 0  # and not this
    run()
    assert recipe.count == 2
    count_change([weight])
    assert not run()[:, :24].any()
    assert recipe.count == 3
    other = recipe_of("fp8_row")
    linear(x, [(weight.flatten(0, 1), None)], other)
    assert len(weight.copies.made) == 2, "one copy for each format"  # pyright: ignore[reportAttributeAccessIssue]


def test_gradients_are_written_to_their_place():
    weight = torch.nn.Parameter(numbers(24, 32, seed=1))
    place = torch.full((24 * 32,), torch.nan)
    attach_gradient_sink(weight, lambda dtype: place, lambda: None)
    (y,) = linear(numbers(6, 32, seed=2), [(weight, None)], recipe_of("fp8_block"))
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == place.data_ptr()
    assert place.isfinite().all()


def test_layers_of_one_input_sum_their_input_gradients():
    recipe = recipe_of("fp8_block")
    weights = [numbers(n, 128, seed=n).requires_grad_() for n in (32, 64)]
    gradients = []
    for implementation in (linear.reference, linear.implementations["fused_dgrad"]):
        x = numbers(130, 128, seed=1).requires_grad_()
        outputs = implementation(x, [(weight, None) for weight in weights], recipe)
        torch.autograd.backward(outputs, [numbers(*y.shape, seed=7) for y in outputs])
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-5)


def test_gradients_are_e5m2_on_request_and_inputs_never():
    recipe = recipe_of("fp8_block", gradient_format="e5m2")
    x = numbers(6, 32, seed=2)
    gradient, value = recipe.gradient(x, None), recipe.input(x, None)
    assert gradient.rows is not None
    assert value.rows is not None
    assert gradient.rows.values.dtype == E5M2.dtype
    assert value.rows.values.dtype == torch.float8_e4m3fn
