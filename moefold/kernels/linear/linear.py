"""Linear layers, y = x W^T + b: dense ones that read one input, and one per expert in a grouped product.

    linear           (..., D) to (..., N) for each layer
    grouped_linear   y_RN[r] = W_END[expert of r] x_RD[r]

D inputs, N outputs; R rows sorted by expert, E experts; the rows of expert e end before `ends_E[e]`. Both ops
are the autograd function of kernels/linear/product.py; implementations differ in their products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.few_rows import has_few_rows
from moefold.kernels.linear.matmul import tiled_product
from moefold.kernels.linear.product import (
    PLAIN,
    Adapter,
    ExpertRows,
    Operand,
    Products,
    Recipe,
    WeightAndBias,
    multiply,
    widened,
)
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.layout.gradient_sink import memory_for_gradient


class DenseProducts:
    """Plain torch products of dequantised operands: the reference of any recipe without products of its own."""

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor:
        x_TD = x.dequantised()
        w_ND = w.dequantised()
        wide_x_TD = widened(x_TD)
        wide_w_ND = widened(w_ND)
        if bias is not None:
            bias = bias.to(wide_x_TD.dtype)
        y_TN = F.linear(wide_x_TD, wide_w_ND, bias)
        return y_TN.to(x_TD.dtype)

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dy_TN = dy.dequantised()
        w_ND = w.dequantised()
        wide_dx_TD = widened(dy_TN) @ widened(w_ND)
        dx_TD = wide_dx_TD.to(dy_TN.dtype)
        return dx_TD if into is None else into.add_(dx_TD)

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        dy_TN = dy.dequantised_columns()
        x_TD = x.dequantised_columns()
        dw_ND = widened(dy_TN).T @ widened(x_TD)
        return dw_ND.to(weight.dtype)


class FusedDgradProducts(DenseProducts):
    """The GEMMs accumulate the input gradients of several layers and write weight gradients to their places in the
    buckets, so neither takes a further pass over memory."""

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dy_TN = dy.dequantised()
        w_ND = w.dequantised()
        if into is None:
            return dy_TN @ w_ND
        return into.addmm_(dy_TN, w_ND)

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        dy_TN = dy.dequantised_columns()
        x_TD = x.dequantised_columns()
        if x_TD.dtype != weight.dtype:  # scales of another type: the product has that type, and is rounded after
            return super().weight(dy, x, weight)
        dw_ND = memory_for_gradient(weight)
        dy_NT = dy_TN.T
        return torch.mm(dy_NT, x_TD, out=dw_ND)


Layers = Sequence[WeightAndBias]
Recipes = Recipe | Sequence[Recipe]  # of all layers, or of each
Outputs = tuple[Tensor, ...]  # of each layer

DENSE_PRODUCTS = DenseProducts()
FUSED_DGRAD_PRODUCTS = FusedDgradProducts()


@register_op
def linear(x: Tensor, layers: Layers, recipe: Recipes = PLAIN, adapters: Sequence[Adapter] = ()) -> Outputs:
    """The output of each layer, with that of its adapter. Each is a node of its own: autograd sums the input
    gradients."""
    outputs: list[Tensor] = []
    if isinstance(recipe, Sequence):  # with one operand of the input
        outputs += multiply(x, layers, recipe, DENSE_PRODUCTS)
    else:
        for layer in layers:
            outputs += multiply(x, [layer], recipe, DENSE_PRODUCTS)
    return add_adapters(x, outputs, adapters, DENSE_PRODUCTS)


def add_adapters(x: Tensor, outputs: Sequence[Tensor], adapters: Sequence[Adapter], products: Products) -> Outputs:
    """Outputs of weights, with those of adapters: two further products each."""
    results: list[Tensor] = []
    for y, adapter in zip(outputs, adapters or [None] * len(outputs), strict=True):
        if adapter is not None:
            y = y + low_rank_product(x, adapter, products)
        results.append(y)
    return tuple(results)


def low_rank_product(x: Tensor, adapter: tuple[Tensor, Tensor, float], products: Products) -> Tensor:
    a, b, scale = adapter
    first, second = (a, None), (b, None)
    (low,) = multiply(x, [first], PLAIN, products)
    (y,) = multiply(low * scale, [second], PLAIN, products)
    return y


@linear.register_fast("fused_dgrad")
def linear_fused_dgrad(x: Tensor, layers: Layers, recipe: Recipes = PLAIN, adapters: Sequence[Adapter] = ()) -> Outputs:
    is_plain = recipe is PLAIN and not any(adapters)
    if is_plain and not torch.is_grad_enabled() and has_few_rows(x):
        return multiply_few_rows(x, layers)
    return multiply(x, layers, recipe, FUSED_DGRAD_PRODUCTS, adapters=adapters)


def multiply_few_rows(x: Tensor, layers: Layers) -> Outputs:
    from moefold.kernels.linear.few_rows_triton import launch_few_rows

    *lead, _ = x.shape
    x_TD = x.flatten(0, -2)
    outputs = launch_few_rows(x_TD, layers)
    return tuple(y_TN.unflatten(0, lead) for y_TN in outputs)


class TiledProducts(DenseProducts):
    """Forward multiplies rows in tiles: the bits of a row do not depend on the others."""

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor:
        x_TD = x.dequantised()
        w_ND = w.dequantised()
        y_TN = tiled_product(x_TD, w_ND)
        if bias is None:
            return y_TN
        bias = bias.to(y_TN.dtype)
        return y_TN + bias


TILED_PRODUCTS = TiledProducts()


@linear.register_fast("invariant")
def linear_invariant(x: Tensor, layers: Layers, recipe: Recipes = PLAIN, adapters: Sequence[Adapter] = ()) -> Outputs:
    outputs = multiply(x, layers, recipe, TILED_PRODUCTS)
    return add_adapters(x, outputs, adapters, TILED_PRODUCTS)


class LinearShape(NamedTuple):
    lead: tuple[int, ...]
    inputs: int
    outputs: tuple[int, ...]  # of each layer
    biased: bool  # the first layer


LINEAR_SHAPES = [
    LinearShape((5,), 8, (16,), True),
    LinearShape((2, 3), 16, (8, 24, 8), False),
    LinearShape((33,), 64, (64, 8), True),
    LinearShape((0,), 8, (4, 4), False),
]


@linear.register_cases
def linear_cases(draw: CaseInputs) -> Cases:
    for shape in LINEAR_SHAPES:
        d = shape.inputs
        scale = d**-0.5
        layers: list[WeightAndBias] = []
        for seed, n in enumerate(shape.outputs, 1):
            weight = draw.normal(n, d, seed=seed, scale=scale)
            layers.append((weight, None))
        if shape.biased:
            weight, _ = layers[0]
            width = len(weight)
            bias = draw.normal(width, seed=20)
            layers[0] = (weight, bias)
        lead = shape.lead
        x = draw.normal(*lead, d)
        sizes = map(str, lead)
        rows = "x".join(sizes)
        sizes = map(str, shape.outputs)
        widths = ", ".join(sizes)
        name = f"{rows} rows of {d} to {widths}"
        yield KernelCase(name, (x, layers))
        if shape.inputs == 16:
            yield KernelCase(f"{name}, with adapters", (x, layers, PLAIN, adapters_of_case(draw, layers)))


def adapters_of_case(draw: CaseInputs, layers: Layers) -> list[Adapter]:
    """Of all layers but the second."""
    adapters: list[Adapter] = []
    for number, (weight, _) in enumerate(layers):
        n, d = weight.shape
        a = draw.normal(4, d, seed=30 + number, scale=d**-0.5)
        b = draw.normal(n, 4, seed=40 + number)
        adapters.append(None if number == 1 else (a, b, 0.5))
    return adapters


GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedGemms(NamedTuple):
    """Rows times their expert's matrix, and the gradient of the matrices; by default the references."""

    rows: GroupedGemm = grouped_gemm
    weight: GroupedGemm = grouped_gemm_weight


class GroupedProducts:
    """Grouped GEMMs of dequantised operands: the reference of any recipe without products of its own."""

    def __init__(self, gemms: GroupedGemms, ends_E: Tensor):
        self.gemms = gemms
        self.ends_E = ends_E

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor:
        """Experts' biases are an op of their own (kernels/experts/expert_bias.py)."""
        x_RD = x.dequantised()
        w_END = w.dequantised()
        multiply_rows = self.gemms.rows
        return multiply_rows(x_RD, w_END, self.ends_E)

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dy_RN = dy.dequantised().contiguous()  # grouped GEMMs refuse expanded gradients, such as those of a plain sum
        w_EDN = w.dequantised().mT
        multiply_rows = self.gemms.rows
        dx_RD = multiply_rows(dy_RN, w_EDN, self.ends_E)
        return dx_RD if into is None else into.add_(dx_RD)

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        dy_RN = dy.dequantised_columns().contiguous()
        x_RD = x.dequantised_columns()
        multiply_columns = self.gemms.weight
        dw_END = multiply_columns(dy_RN, x_RD, self.ends_E)
        return dw_END.to(weight.dtype)


REFERENCE_GEMMS = GroupedGemms()


@register_op
def grouped_linear(
    x_RD: Tensor,
    w_END: Tensor,
    ends_E: Tensor,
    recipe: Recipe = PLAIN,
    gemms: GroupedGemms = REFERENCE_GEMMS,
    are_tokens: bool = False,
) -> Tensor:
    products = GroupedProducts(gemms, ends_E)
    layer = (w_END, None)
    rows = ExpertRows(ends_E, are_tokens)
    outputs = multiply(x_RD, [layer], recipe, products, rows)
    return outputs[0]


@grouped_linear.register_cases
def grouped_linear_cases(draw: CaseInputs) -> Cases:
    yield from grouped_gemm.cases(*draw)
