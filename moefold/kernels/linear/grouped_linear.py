"""A linear layer per expert, all in one grouped product: y_RN[r] = W_END[expert of r] x_RD[r].

R rows sorted by expert, D inputs, N outputs, E experts; the rows of expert e end before `ends_E[e]`. The op is the
autograd function of kernels/linear/product.py; the grouped GEMMs are passed in as its products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.product import PLAIN, Operand, Products, Recipe, multiply
from moefold.kernels.registry import KernelCase, register_op

GroupedGemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedProducts:
    """Products of dequantised operands by the given grouped GEMMs: the reference of any recipe."""

    def __init__(self, gemm: GroupedGemm = grouped_gemm, weight_gemm: GroupedGemm = grouped_gemm_weight):
        self.gemm = gemm
        self.weight_gemm = weight_gemm

    def forward(self, x: Operand, w: Operand, bias: torch.Tensor | None, ends_E: torch.Tensor | None) -> torch.Tensor:
        assert ends_E is not None
        assert bias is None, "the bias of experts is an op of its own (kernels/experts/expert_bias.py)"
        return self.gemm(x.dequantised(), w.dequantised(), ends_E)

    def data(self, dy: Operand, w: Operand, ends_E: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor:
        assert ends_E is not None
        dy_RN = dy.dequantised().contiguous()  # grouped GEMMs refuse expanded gradients, such as those of a plain sum
        dx_RD = self.gemm(dy_RN, w.dequantised().mT, ends_E)
        return dx_RD if into is None else into.add_(dx_RD)

    def weight(self, dy: Operand, x: Operand, weight: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor | None:
        assert ends_E is not None
        dy_RN = dy.along_columns().dequantised().contiguous()
        x_RD = x.along_columns().dequantised()
        return self.weight_gemm(dy_RN, x_RD, ends_E).to(weight.dtype)


REFERENCE_PRODUCTS = GroupedProducts()


@register_op
def grouped_linear(
    x_RD: torch.Tensor,
    w_END: torch.Tensor,
    ends_E: torch.Tensor,
    recipe: Recipe = PLAIN,
    products: Products = REFERENCE_PRODUCTS,
) -> torch.Tensor:
    (y_RN,) = multiply(x_RD, [(w_END, None)], recipe, products, ends_E)
    return y_RN


@grouped_linear.register_cases
def grouped_linear_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    assert grouped_gemm.make_cases is not None
    yield from grouped_gemm.make_cases(device, dtype)
