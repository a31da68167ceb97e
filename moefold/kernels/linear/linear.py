"""Linear layers that read one input: y = x W^T + b for each. (..., D) to (..., N).

The op is the autograd function of kernels/linear/product.py; its implementations differ in their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from moefold.kernels.linear.product import PLAIN, Operand, Recipe, WeightAndBias, multiply
from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.layout.gradient_sink import memory_for_gradient


class DenseProducts:
    """Plain torch products of dequantised operands: the reference of any recipe."""

    def forward(self, x: Operand, w: Operand, bias: torch.Tensor | None, ends_E: torch.Tensor | None) -> torch.Tensor:
        x_TD = x.dequantised()
        if bias is not None:
            bias = bias.to(x_TD.dtype)
        return F.linear(x_TD, w.dequantised(), bias)

    def data(self, dy: Operand, w: Operand, ends_E: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor:
        dx = dy.dequantised() @ w.dequantised()
        return dx if into is None else into.add_(dx)

    def weight(self, dy: Operand, x: Operand, weight: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor | None:
        dy_TN = dy.along_columns().dequantised()
        x_TD = x.along_columns().dequantised()
        return (dy_TN.T @ x_TD).to(weight.dtype)


class FusedDgradProducts(DenseProducts):
    """The GEMMs accumulate the input gradients of several layers and write weight gradients to their places in the
    buckets, so neither takes a further pass over memory."""

    def data(self, dy: Operand, w: Operand, ends_E: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor:
        dy_TN, w_ND = dy.dequantised(), w.dequantised()
        return dy_TN @ w_ND if into is None else into.addmm_(dy_TN, w_ND)

    def weight(self, dy: Operand, x: Operand, weight: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor | None:
        dy_TN = dy.along_columns().dequantised()
        x_TD = x.along_columns().dequantised()
        if x_TD.dtype != weight.dtype:
            return super().weight(dy, x, weight, ends_E)
        return torch.mm(dy_TN.T, x_TD, out=memory_for_gradient(weight))


DENSE_PRODUCTS = DenseProducts()
FUSED_DGRAD_PRODUCTS = FusedDgradProducts()


@register_op
def linear(x: torch.Tensor, layers: Sequence[WeightAndBias], recipe: Recipe = PLAIN) -> tuple[torch.Tensor, ...]:
    """The output of each layer. Autograd sums the input gradients of the layers."""
    return tuple(multiply(x, [layer], recipe, DENSE_PRODUCTS)[0] for layer in layers)


@linear.register_fast("adding")
def linear_fused_dgrad(
    x: torch.Tensor, layers: Sequence[WeightAndBias], recipe: Recipe = PLAIN
) -> tuple[torch.Tensor, ...]:
    return multiply(x, layers, recipe, FUSED_DGRAD_PRODUCTS)


LINEAR_SHAPES: list[tuple[tuple[int, ...], int, tuple[int, ...], bool]] = [
    ((5,), 8, (16,), True),
    ((2, 3), 16, (8, 24, 8), False),
    ((33,), 64, (64, 8), True),
    ((0,), 8, (4, 4), False),
]  # leading dims, D, the N of each layer, whether the first has a bias


@linear.register_cases
def linear_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for lead, d, widths, biased in LINEAR_SHAPES:
        layers: list[WeightAndBias] = []
        for i, n in enumerate(widths):
            weight = seeded_randn(device, dtype, n, d, seed=i + 1, scale=d**-0.5)
            has_bias = biased and i == 0
            bias = seeded_randn(device, dtype, n, seed=20 + i) if has_bias else None
            layers.append((weight, bias))
        rows = "x".join(map(str, lead))
        outputs = ", ".join(map(str, widths))
        x = seeded_randn(device, dtype, *lead, d)
        yield KernelCase(f"{rows} rows of {d} to {outputs}", (x, layers))
