"""Gather of quantised rows into tiles in Triton. Imported only where Triton is.

N tokens, P padded rows in M tiles, D width, B scales of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Quantised
from moefold.kernels.quantise.fp8_triton import load_scales
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.tiles_triton import load_tile_index
from moefold.kernels.routing.rows_triton import load_source_rows
from moefold.kernels.tile_triton import program_block, tile_mask, tile_pointers

ROWS = 32  # of one program
COLS = 512  # bytes of one row
SCALES = COLS // BLOCK


@triton.jit
def gather_tiles_kernel(
    bytes_ND,
    scales_NB,
    tiles_M4,
    index_R,
    bytes_PD,
    scales_BP,
    stride_n,
    stride_b,
    M,
    D,
    B,
    BLOCK: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
    SCALES: constexpr,
):
    """Some rows of a tile, some columns and their scales."""
    programs = BLOCK // ROWS  # of a tile
    m = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    r = part * ROWS + tl.arange(0, ROWS)
    tile = tiles_M4 + 4 * m
    real = tl.load(tile + 2)
    if real == 0:  # not in use
        return
    n = load_tile_index(tile, index_R, r)
    every_r = r < BLOCK
    wide_m = m.to(tl.int64)
    p = wide_m * BLOCK + r
    # bytes
    c = program_block(1, COLS)
    x = load_source_rows(bytes_ND, n, c, D)
    at = tile_pointers(bytes_PD, p, c, D)
    inside = tile_mask(every_r, c < D)
    tl.store(at, x, mask=inside)
    # scales, transposed
    b = program_block(1, SCALES).to(tl.int64)
    real_b = b < B
    line = scales_NB + b[:, None] * stride_b
    source = line + n[None, :] * stride_n
    held = tile_mask(real_b, n >= 0)
    scale = load_scales(source, held)
    at = tile_pointers(scales_BP, b, p, M * BLOCK)
    inside = tile_mask(real_b, every_r)
    tl.store(at, scale, mask=inside)


def launch_gather_tiles(values_ND: Tensor, scales_NB: Tensor, tiles: RowTiles, index_R: Tensor | None) -> Quantised:
    tile_count = len(tiles.tiles_M4)
    b = scales_NB.shape[1]
    padded_rows = tiles.padded_rows
    width = values_ND.shape[1]
    values_PD = values_ND.new_empty(padded_rows, width)
    scales_BP = scales_NB.new_empty(b, padded_rows)
    bytes_ND = values_ND.contiguous().view(torch.uint8)
    bytes_PD = values_PD.view(torch.uint8)
    d = bytes_ND.shape[1]
    # programs: parts of a tile's rows, and columns or their scales, whichever are more
    row_programs = tile_count * (BLOCK // ROWS)
    column_programs = triton.cdiv(d, COLS)
    scale_programs = triton.cdiv(b, SCALES)
    grid = (row_programs, max(column_programs, scale_programs))
    tensors = (bytes_ND, scales_NB, tiles.tiles_M4, index_R, bytes_PD, scales_BP)
    sizes = (*scales_NB.stride(), tile_count, d, b)
    launch = gather_tiles_kernel[grid]
    launch(*tensors, *sizes, BLOCK, ROWS, COLS, SCALES, num_warps=8)
    return Quantised(values_PD, scales_BP.T)
