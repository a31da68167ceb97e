"""The matrices of an adapter beside a weight (LoRA), y = W x + s B (A x), and its products inside those of the weight.

T rows, D inputs, N outputs, L rank. Of a dense layer: A (L, D), B (N, L). Sums go on in the GEMMs, so that no pass over
memory adds two outputs or two gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.layout.gradient_sink import memory_for_gradient


class LowRankMatrices(NamedTuple):
    """`a` (..., L, D), `b` (..., outputs, L), with a first dim of experts or without."""

    a: Tensor
    b: Tensor
    scale: float


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left right, rounded once."""
    shape = (len(left), right.shape[1])
    out = left.new_empty(shape)
    return out.addmm_(left, right, beta=0, alpha=scale)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left right, in the memory of the total."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def write_matrix_gradient(matrix: Tensor, dy_TM: Tensor, x_TK: Tensor) -> Tensor:
    """dy^T x, in the place of the matrix's gradient."""
    out = memory_for_gradient(matrix)
    torch.mm(dy_TM.T, x_TK, out=out.view(-1, x_TK.shape[1]))
    return out
