"""Inverse norms of many matrices, in Triton: squares are added by blocks, in an order that does not depend on how many
matrices there are. Imported only where Triton is."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, numbers_from, program_block, wide_program_id

SQUARES = 4096  # elements whose squares a program adds
SUMS = 512  # such sums that are added at once


@triton.jit
def squares_kernel(x_NE, sums_NB, E, BLOCK: constexpr):
    """The sum of the squares of a block of one matrix."""
    matrix = wide_program_id(1)
    e = program_block(0, BLOCK)
    x = load_as_fp32(x_NE + matrix * E + e, e < E)
    total = tl.sum(x * x, 0)
    blocks = tl.num_programs(0)
    tl.store(sums_NB + matrix * blocks + tl.program_id(0), total)


@triton.jit
def inverse_norm_kernel(sums_NB, out_N, B, least, BLOCK: constexpr):
    """One over the norm of a matrix, from its sums of squares."""
    matrix = wide_program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    row = sums_NB + matrix * B
    for first in range(0, B, BLOCK):
        b = numbers_from(first, BLOCK)
        total += load_or_zero(row + b, b < B)
    norm = tl.sqrt(tl.sum(total, 0))
    tl.store(out_N + matrix, 1.0 / tl.maximum(norm, least))


def inverse_norms(x_NRC: Tensor, least_norm: float) -> Tensor:
    count = len(x_NRC)
    elements = x_NRC[0].numel()
    blocks = triton.cdiv(elements, SQUARES)
    sums = torch.empty(count, blocks, dtype=torch.float32, device=x_NRC.device)
    squares_kernel[(blocks, count)](x_NRC, sums, elements, SQUARES)
    out = torch.empty(count, dtype=torch.float32, device=x_NRC.device)
    inverse_norm_kernel[(count,)](sums, out, blocks, least_norm, SUMS)
    return out
