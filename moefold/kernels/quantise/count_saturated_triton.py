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
from moefold.kernels.quantise.quantise_tiles import TileMaxima
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.tiles_triton import load_tile_index
from moefold.kernels.routing.rows_triton import load_source_rows
from moefold.kernels.tile_triton import program_block


@triton.jit
def count_saturated_kernel(
    source_ND, tiles_M4, index_R, maxima_MD, scales_P, scales_MD, count, D,
    SATURATES: constexpr, BLOCK: constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    tile = tiles_M4 + 4 * m
    if tl.load(tile + 2) == 0:  # no rows: not in use
        return
    wide_m = m.to(tl.int64)
    r = tl.arange(0, BLOCK)
    c = program_block(1, BLOCK)
    real_c = c < D
    at_MD = wide_m * D + c
    most = tl.load(maxima_MD + at_MD, mask=real_c, other=0.0)
    # the largest scaled value of rows and of columns, which is an upper bound for rows
    beyond = tl.zeros([BLOCK, BLOCK], tl.int32)
    leaves_range = False
    if scales_P is not None:
        by_row = tl.div_rn(1.0, tl.load(scales_P + wide_m * BLOCK + r))
        leaves_range = tl.max(most, 0) * tl.max(by_row, 0) > SATURATES
    if scales_MD is not None:
        by_column = tl.div_rn(1.0, tl.load(scales_MD + at_MD, mask=real_c, other=1.0))
        leaves_range = leaves_range | (tl.max(most * by_column, 0) > SATURATES)
    if leaves_range:
        n = load_tile_index(tile, index_R, r)
        x = tl.abs(load_source_rows(source_ND, n, c, D).to(tl.float32))
        if scales_P is not None:
            beyond += (x * by_row[:, None] > SATURATES).to(tl.int32)
        if scales_MD is not None:
            beyond += (x * by_column[None, :] > SATURATES).to(tl.int32)
        total = tl.sum(tl.sum(beyond, 1), 0)
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
    grid = (len(tiles.tiles_M4), triton.cdiv(d, BLOCK))
    tensors = (source_ND.contiguous(), tiles.tiles_M4, index_R, maxima.columns_MD.contiguous(), rows_P, columns_MD)
    count_saturated_kernel[grid](*tensors, count, d, format.saturates, BLOCK, num_warps=8)
    return count
