"""Figures of a quantised copy in Triton. Imported only where Triton is.

One program takes 32 rows by 128 columns of a matrix and writes its own figures, which are summed behind it: in the
same order in every run.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK
from moefold.kernels.quantise.fp8_triton import load_scales
from moefold.kernels.routing.rows_triton import load_index, load_source_rows
from moefold.kernels.tile_triton import program_block, wide_program_id

ROWS = 32
FIGURES = 7


@triton.jit
def rounding_figures_kernel(
    source_ND,
    index_P,
    values,
    scales,
    figures_G7,
    R,
    C,
    value_b,
    value_r,
    value_c,
    scale_b,
    scale_r,
    scale_c,
    COLUMN_SCALES: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    b = wide_program_id(0)
    r = program_block(1, ROWS)
    c = program_block(2, BLOCK)
    # values of the source
    index_at = index_P + b * R + r
    n = load_index(index_at, r < R)
    source = load_source_rows(source_ND, n, c, C)
    x = source.to(tl.float32)
    counted = x != 0
    # bytes and scales of values other than zero
    wide_r = r.to(tl.int64)[:, None]
    wide_c = c.to(tl.int64)[None, :]
    line = values + b * value_b + wide_r * value_r
    at = line + wide_c * value_c
    q = tl.load(at, mask=counted, other=0.0)
    byte = q.to(tl.float32)
    k = wide_c if COLUMN_SCALES else wide_c // BLOCK
    line = scales + b * scale_b + wide_r * scale_r
    at = line + k * scale_c
    scale = load_scales(at, counted)
    difference = x - byte * scale
    error = tl.where(counted, difference, 0.0)
    underflowed = counted & (byte == 0)
    # this program's figures
    line = b * tl.num_programs(1) + tl.program_id(1)
    program = line * tl.num_programs(2) + tl.program_id(2)
    out = figures_G7 + 7 * program
    store_sum(out, counted.to(tl.float32))
    store_sum(out + 1, underflowed.to(tl.float32))
    store_sum(out + 2, error * error)
    store_sum(out + 3, x * x)
    store_largest(out + 4, tl.abs(x), counted)
    store_largest(out + 5, scale, counted)
    store_largest(out + 6, -scale, counted)


@triton.jit
def store_sum(at, x):
    of_rows = tl.sum(x, 1)
    total = tl.sum(of_rows, 0)
    tl.store(at, total)


@triton.jit
def store_largest(at, x, counted):
    """The largest of the values that count; minus infinity without one."""
    x = tl.where(counted, x, float("-inf"))
    of_rows = tl.max(x, 1)
    largest = tl.max(of_rows, 0)
    tl.store(at, largest)


def launch_rounding_figures(
    source_ND: Tensor, index_P: Tensor, values_BRC: Tensor, scales_BRK: Tensor, column_scales: bool
) -> Tensor:
    """(G, 7): the figures of each program."""
    b, r, c = values_BRC.shape
    row_programs = triton.cdiv(r, ROWS)
    column_programs = triton.cdiv(c, BLOCK)
    grid = (b, row_programs, column_programs)
    figures_G7 = source_ND.new_empty(prod(grid), FIGURES, dtype=torch.float32)
    source_ND = source_ND.contiguous()
    index_P = index_P.contiguous()
    tensors = (source_ND, index_P, values_BRC, scales_BRK, figures_G7)
    strides = (*values_BRC.stride(), *scales_BRK.stride())
    launch = rounding_figures_kernel[grid]
    launch(*tensors, r, c, *strides, column_scales, ROWS, BLOCK)
    return figures_G7
