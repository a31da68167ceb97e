"""Figures of a quantised copy in Triton. Imported only where Triton is.

One program takes 32 rows by 128 columns of a matrix and writes its own figures, which are summed behind it: in the
same order in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK
from moefold.kernels.routing.rows_triton import load_index, load_source_rows
from moefold.kernels.tile_triton import program_block, wide_program_id

ROWS = 32
FIGURES = 7


@triton.jit
def rounding_figures_kernel(
    source_ND, index_P, values, scales, figures_G7, R, C,
    value_b, value_r, value_c, scale_b, scale_r, scale_c,
    COLUMN_SCALES: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    b = wide_program_id(0)
    r = program_block(1, ROWS)
    c = program_block(2, BLOCK)
    n = load_index(index_P + b * R + r, r < R)
    x = load_source_rows(source_ND, n, c, C).to(tl.float32)
    counted = x != 0
    # bytes and scales of values other than zero
    wide_r = r.to(tl.int64)[:, None]
    wide_c = c.to(tl.int64)[None, :]
    at = values + b * value_b + wide_r * value_r + wide_c * value_c
    byte = tl.load(at, mask=counted, other=0.0).to(tl.float32)
    k = wide_c if COLUMN_SCALES else wide_c // BLOCK
    at = scales + b * scale_b + wide_r * scale_r + k * scale_c
    scale = tl.load(at, mask=counted, other=1.0)
    error = tl.where(counted, x - byte * scale, 0.0)
    underflowed = counted & (byte == 0)
    # this program's figures
    program = (b * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    out = figures_G7 + 7 * program
    nothing = float("-inf")
    tl.store(out, sum_of_block(counted.to(tl.float32)))
    tl.store(out + 1, sum_of_block(underflowed.to(tl.float32)))
    tl.store(out + 2, sum_of_block(error * error))
    tl.store(out + 3, sum_of_block(x * x))
    tl.store(out + 4, largest_of_block(tl.where(counted, tl.abs(x), nothing)))
    tl.store(out + 5, largest_of_block(tl.where(counted, scale, nothing)))
    tl.store(out + 6, largest_of_block(tl.where(counted, -scale, nothing)))


@triton.jit
def sum_of_block(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def largest_of_block(x):
    return tl.max(tl.max(x, 1), 0)


def launch_rounding_figures(
    source_ND: Tensor, index_P: Tensor, values_BRC: Tensor, scales_BRK: Tensor, column_scales: bool
) -> Tensor:
    """(G, 7): the figures of each program."""
    b, r, c = values_BRC.shape
    grid = (b, triton.cdiv(r, ROWS), triton.cdiv(c, BLOCK))
    programs = grid[0] * grid[1] * grid[2]
    figures_G7 = torch.empty(programs, FIGURES, dtype=torch.float32, device=source_ND.device)
    tensors = (source_ND.contiguous(), index_P.contiguous(), values_BRC, scales_BRK, figures_G7)
    strides = (*values_BRC.stride(), *scales_BRK.stride())
    rounding_figures_kernel[grid](*tensors, r, c, *strides, column_scales, ROWS, BLOCK)
    return figures_G7
