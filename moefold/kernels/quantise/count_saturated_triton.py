"""Count of saturated values in Triton. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns, and reads them only if their maxima leave the range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Fp8Format
from moefold.kernels.quantise.fp8_triton import load_scales
from moefold.kernels.quantise.quantise_tiles import TileMaxima
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.tiles_triton import load_tile_index
from moefold.kernels.routing.rows_triton import load_source_rows
from moefold.kernels.tile_triton import load_or_zero, program_block


@triton.jit
def count_saturated_kernel(
    source_ND, tiles_M4, index_R, maxima_MD, scales_P, scales_MD, count, D, SATURATES: constexpr, BLOCK: constexpr
):
    m = tl.program_id(0)
    tile = tiles_M4 + 4 * m
    real = tl.load(tile + 2)
    if real == 0:  # not in use
        return
    wide_m = m.to(tl.int64)
    r = tl.arange(0, BLOCK)
    c = program_block(1, BLOCK)
    real_c = c < D
    at_MD = wide_m * D + c
    most = load_or_zero(maxima_MD + at_MD, real_c)
    # the largest scaled value of rows and of columns, which is an upper bound for rows
    beyond = tl.zeros([BLOCK, BLOCK], tl.int32)
    leaves_range = False
    if scales_P is not None:
        scale = tl.load(scales_P + wide_m * BLOCK + r)
        by_row = tl.div_rn(1.0, scale)
        bound = tl.max(most, 0) * tl.max(by_row, 0)
        leaves_range = bound > SATURATES
    if scales_MD is not None:
        scale = load_scales(scales_MD + at_MD, real_c)
        by_column = tl.div_rn(1.0, scale)
        largest = tl.max(most * by_column, 0)
        leaves_range = leaves_range | (largest > SATURATES)
    # the values themselves
    if leaves_range:
        n = load_tile_index(tile, index_R, r)
        source = load_source_rows(source_ND, n, c, D)
        x = tl.abs(source.to(tl.float32))
        if scales_P is not None:
            is_beyond = x * by_row[:, None] > SATURATES
            beyond += is_beyond.to(tl.int32)
        if scales_MD is not None:
            is_beyond = x * by_column[None, :] > SATURATES
            beyond += is_beyond.to(tl.int32)
        of_rows = tl.sum(beyond, 1)
        total = tl.sum(of_rows, 0)
        tl.atomic_add(count, total.to(tl.int64))  # whole numbers: the same in any order


def launch_count_saturated(
    source_ND: Tensor,
    tiles: RowTiles,
    maxima: TileMaxima,
    format: Fp8Format,
    rows_P: Tensor | None,
    columns_MD: Tensor | None,
    index_R: Tensor | None,
) -> Tensor:
    d = source_ND.shape[1]
    count = torch.zeros(1, dtype=torch.int64, device=source_ND.device)
    source_ND = source_ND.contiguous()
    maxima_MD = maxima.columns_MD.contiguous()
    tensors = (source_ND, tiles.tiles_M4, index_R, maxima_MD, rows_P, columns_MD)
    tile_count = len(tiles.tiles_M4)
    blocks = triton.cdiv(d, BLOCK)
    launch = count_saturated_kernel[tile_count, blocks]
    launch(*tensors, count, d, format.saturates, BLOCK, num_warps=8)
    return count
