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
from moefold.kernels.linear.product import PLAIN, ExpertRows, Operand, Recipe, WeightAndBias, multiply
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.layout.gradient_sink import memory_for_gradient


class DenseProducts:
    """Plain torch products of dequantised operands: the reference of any recipe without products of its own."""

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor:
        x_TD = x.dequantised()
        if bias is not None:
            bias = bias.to(x_TD.dtype)
        return F.linear(x_TD, w.dequantised(), bias)

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dx_TD = dy.dequantised() @ w.dequantised()
        if into is None:
            return dx_TD
        return into.add_(dx_TD)

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        dy_TN = dy.along_columns().dequantised()
        x_TD = x.along_columns().dequantised()
        dw_ND = dy_TN.T @ x_TD
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
        dy_TN = dy.along_columns().dequantised()
        x_TD = x.along_columns().dequantised()
        if x_TD.dtype != weight.dtype:  # scales of another type: the product has that type, and is rounded after
            return super().weight(dy, x, weight)
        return torch.mm(dy_TN.T, x_TD, out=memory_for_gradient(weight))


DENSE_PRODUCTS = DenseProducts()
FUSED_DGRAD_PRODUCTS = FusedDgradProducts()


@register_op
def linear(x: Tensor, layers: Sequence[WeightAndBias], recipe: Recipe = PLAIN) -> tuple[Tensor, ...]:
    """The output of each layer. Each is a node of its own: autograd sums the input gradients."""
    outputs: list[Tensor] = []
    for layer in layers:
        outputs += multiply(x, [layer], recipe, DENSE_PRODUCTS)
    return tuple(outputs)


@linear.register_fast("fused_dgrad")
def linear_fused_dgrad(x: Tensor, layers: Sequence[WeightAndBias], recipe: Recipe = PLAIN) -> tuple[Tensor, ...]:
    return multiply(x, layers, recipe, FUSED_DGRAD_PRODUCTS)


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
        lead, d, outputs, biased = shape
        layers: list[WeightAndBias] = []
        for i, n in enumerate(outputs):
            scale = d**-0.5
            weight = draw.normal(n, d, seed=i + 1, scale=scale)
            layers.append((weight, None))
        if biased:
            bias = draw.normal(outputs[0], seed=20)
            layers[0] = (layers[0][0], bias)
        x = draw.normal(*lead, d)
        rows = "x".join(map(str, lead))
        widths = ", ".join(map(str, outputs))
        yield KernelCase(f"{rows} rows of {d} to {widths}", (x, layers))


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
        return self.gemms.rows(x_RD, w.dequantised(), self.ends_E)

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dy_RN = dy.dequantised().contiguous()  # grouped GEMMs refuse expanded gradients, such as those of a plain sum
        w_EDN = w.dequantised().mT
        dx_RD = self.gemms.rows(dy_RN, w_EDN, self.ends_E)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        dy_RN = dy.along_columns().dequantised()
        x_RD = x.along_columns().dequantised()
        dw_END = self.gemms.weight(dy_RN.contiguous(), x_RD, self.ends_E)
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
    (y_RN,) = multiply(x_RD, [layer], recipe, products, rows)
    return y_RN


@grouped_linear.register_cases
def grouped_linear_cases(draw: CaseInputs) -> Cases:
    yield from grouped_gemm.cases(*draw)
