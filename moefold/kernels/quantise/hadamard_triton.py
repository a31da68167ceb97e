"""The random Hadamard transform in Triton (rule: hadamard.py): the same sums and differences in the same order, so that
results are the same bits. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise import hadamard
from moefold.kernels.quantise.block_tiles_triton import (
    as_row_blocks,
    flat_tile,
    inside_tile,
    load_tile,
    matrix_and_lines,
    plan_tiles,
)
from moefold.kernels.quantise.fp8_triton import magnitude_bits
from moefold.kernels.tile_triton import program_block

SIZE = constexpr(hadamard.HADAMARD_SIZE)
NEGATIVE = constexpr(sum(1 << place for place, sign in enumerate(hadamard.SIGNS) if sign < 0))
FACTOR = constexpr(hadamard.HADAMARD_SIZE**-0.5)


@triton.jit
def sums_and_differences(y, LINES: constexpr, HALF: constexpr):
    """Of the two halves of each 2 * HALF values of lines of 16."""
    pairs: constexpr = (LINES, SIZE // (2 * HALF), 2, HALF)
    halves = tl.permute(tl.reshape(y, pairs), (0, 1, 3, 2))
    first, second = tl.split(halves)
    mixed = tl.join(first + second, first - second)
    lines: constexpr = (LINES, SIZE)
    return tl.reshape(tl.permute(mixed, (0, 1, 3, 2)), lines)


@triton.jit
def hadamard_kernel(
    source,
    places,
    out,
    maxima,
    M,
    N,
    stride_a,
    stride_m,
    stride_n,
    HEIGHT: constexpr,
    BLOCK: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    a, m = matrix_and_lines(M, TILE_M)
    n = program_block(1, TILE_N)
    x = load_tile(source, places, a, m, n, M, N, stride_a, stride_m, stride_n)
    LINES: constexpr = TILE_M * TILE_N // SIZE
    lines: constexpr = (LINES, SIZE)
    y = tl.reshape(x, lines)
    is_negative = (NEGATIVE >> tl.arange(0, SIZE)) & 1
    sign = tl.where(is_negative == 1, -1.0, 1.0)
    y = y * sign[None, :]
    y = sums_and_differences(y, LINES, 1)
    y = sums_and_differences(y, LINES, 2)
    y = sums_and_differences(y, LINES, 4)
    y = sums_and_differences(y, LINES, 8)
    shape: constexpr = (TILE_M, TILE_N)
    scaled = tl.reshape(y * FACTOR, shape)
    rounded = scaled.to(out.dtype.element_ty)
    tl.store(flat_tile(out, a, m, n, M, N), rounded, mask=inside_tile(m, n, M, N))
    # bits of magnitudes have their order, and their maximum does not depend on the order of programs
    bits = magnitude_bits(rounded.to(tl.float32))
    tl.atomic_max(maxima + a, tl.max(tl.max(bits, 1), 0))


def launch_hadamard(x_RD: Tensor, source_P: Tensor) -> tuple[Tensor, Tensor]:
    blocks = as_row_blocks(x_RD, source_P, hadamard.HADAMARD_SIZE)
    out = x_RD.new_empty(blocks.shape)
    maxima = x_RD.new_zeros(blocks.count, dtype=torch.int32)
    if out.numel():
        plan = plan_tiles(blocks, hadamard.HADAMARD_SIZE, 1)
        launch = hadamard_kernel[plan.grid]
        launch(x_RD, source_P, out, maxima, blocks.lines, blocks.width, *blocks.strides, **plan.constants)
    return out, maxima.view(torch.float32)
