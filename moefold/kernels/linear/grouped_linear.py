"""A linear layer per expert, all in one grouped product: y_RN[r] = W_END[expert of r] x_RD[r].

R rows sorted by expert, D inputs, N outputs, E experts; the rows of expert e end before `ends_E[e]`. The op is the
autograd function of kernels/linear/product.py; its reference multiplies by the grouped GEMMs that are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.product import PLAIN, Operand, Recipe, multiply
from moefold.kernels.registry import KernelCase, register_op

GroupedGemm = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedGemms(NamedTuple):
    """Rows times their expert's matrix, and the gradient of the matrices; by default the references."""

    rows: GroupedGemm = grouped_gemm
    weight: GroupedGemm = grouped_gemm_weight


class GroupedProducts:
    """Grouped GEMMs of dequantised operands: the reference of any recipe."""

    def __init__(self, gemms: GroupedGemms, ends_E: Tensor):
        self.gemms = gemms
        self.ends_E = ends_E

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor:
        """Experts' biases are an op of their own (kernels/experts/expert_bias.py)."""
        x_RD = x.dequantised()
        return self.gemms.rows(x_RD, w.dequantised(), self.ends_E)

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        dy_RN = dy.dequantised().contiguous()  # grouped GEMMs refuse expanded gradients, such as those of a plain sum
        dx_RD = self.gemms.rows(dy_RN, w.dequantised().mT, self.ends_E)
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
    x_RD: Tensor, w_END: Tensor, ends_E: Tensor, recipe: Recipe = PLAIN, gemms: GroupedGemms = REFERENCE_GEMMS
) -> Tensor:
    products = GroupedProducts(gemms, ends_E)
    (y_RN,) = multiply(x_RD, [(w_END, None)], recipe, products)
    return y_RN


@grouped_linear.register_cases
def grouped_linear_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    assert grouped_gemm.make_cases is not None
    yield from grouped_gemm.make_cases(device, dtype)
