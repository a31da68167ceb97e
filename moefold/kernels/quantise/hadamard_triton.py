"""The random Hadamard transform in Triton (rule: hadamard.py): the same sums and differences in the same order, so that
results are the same bits. Tuples grow by sums, as Triton knows no other way. Imported only where Triton is."""

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
    matrix_and_lines,
    plan_tiles,
)
from moefold.kernels.quantise.fp8_triton import magnitude_bits
from moefold.kernels.tile_triton import load_as_fp32

SIZE = constexpr(hadamard.HADAMARD_SIZE)
NEGATIVE = constexpr(sum(1 << place for place, sign in enumerate(hadamard.SIGNS) if sign < 0))
FACTOR = constexpr(hadamard.HADAMARD_SIZE**-0.5)
WARPS = 2  # threads with twice the lines need fewer instructions for each


@triton.jit
def load_rows(
    source,
    places,
    a,
    m,
    M,
    stride_m,
    stride_n,
):
    """The 16 rows of block a as a tuple of vectors in fp32, with the signs of the transform."""
    rows = ()
    for n in tl.static_range(SIZE):
        row = tl.load(places + a * SIZE + n)
        at = source + row.to(tl.int64) * stride_n + m.to(tl.int64) * stride_m
        x = load_as_fp32(at, (m < M) & (row >= 0))
        if (NEGATIVE >> n) & 1:
            x = -x
        rows = rows + (x,)  # noqa: RUF005
    return rows


@triton.jit
def sums_and_differences(y, HALF: constexpr):
    """Of the two halves of each 2 * HALF vectors."""
    mixed = ()
    for n in tl.static_range(SIZE):
        if n & HALF:
            mixed = mixed + (y[n ^ HALF] - y[n],)  # noqa: RUF005
        else:
            mixed = mixed + (y[n] + y[n ^ HALF],)  # noqa: RUF005
    return mixed


@triton.jit
def join_halves(y, HALF: constexpr):
    """2 * HALF tensors as HALF, with a further dim."""
    joined = ()
    for n in tl.static_range(HALF):
        joined = joined + (tl.join(y[n], y[n + HALF]),)  # noqa: RUF005
    return joined


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
    """A thread has all 16 values of a line, so that no sum needs another thread's."""
    a, m = matrix_and_lines(M, TILE_M)
    y = load_rows(source, places, a, m, M, stride_m, stride_n)
    y = sums_and_differences(y, 1)
    y = sums_and_differences(y, 2)
    y = sums_and_differences(y, 4)
    y = sums_and_differences(y, 8)
    largest = tl.zeros((TILE_M,), tl.float32)
    for n in tl.static_range(SIZE):
        largest = tl.maximum(largest, tl.abs(y[n]), tl.PropagateNan.ALL)
    # rounding keeps the order of magnitudes: the largest of what is stored is the largest, rounded
    rounded = (largest * FACTOR).to(out.dtype.element_ty)
    # bits of magnitudes have their order, and their maximum does not depend on the order of programs
    bits = magnitude_bits(rounded.to(tl.float32))
    tl.atomic_max(maxima + a, tl.max(bits, 0))
    # lines
    y = join_halves(join_halves(join_halves(join_halves(y, 8), 4), 2), 1)
    shape: constexpr = (TILE_M, SIZE)
    lines = (tl.reshape(y[0], shape) * FACTOR).to(out.dtype.element_ty)
    n = tl.arange(0, SIZE)
    tl.store(flat_tile(out, a, m, n, M, N), lines, mask=(m < M)[:, None])


def launch_hadamard(x_RD: Tensor, source_P: Tensor) -> tuple[Tensor, Tensor]:
    blocks = as_row_blocks(x_RD, source_P, hadamard.HADAMARD_SIZE)
    out = x_RD.new_empty(blocks.shape)
    maxima = x_RD.new_zeros(blocks.count, dtype=torch.int32)
    if out.numel():
        plan = plan_tiles(blocks, hadamard.HADAMARD_SIZE, 1)
        launch = hadamard_kernel[plan.grid]
        sizes = (blocks.lines, blocks.width, *blocks.strides)
        launch(
            x_RD,
            source_P,
            out,
            maxima,
            *sizes,
            **plan.constants,
            num_warps=WARPS,
        )
    return out, maxima.view(torch.float32)
