"""The launches of the Gluon kernels that quantise rows in tiles. Imported only where Triton is."""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles_hopper import quantise_tiles_kernel, tile_maxima_kernel
from moefold.kernels.quantise.quantise_tiles_triton import Scales, empty_copy, kind_of_scales, named_copies
from moefold.kernels.quantise.row_tiles import RowTiles

WARPS = 8  # the layout of a tile in its threads


def launch_quantise_tiles(
    source_ND: Tensor, tiles: RowTiles, rule: ScaleRule, rows: Scales, columns: Scales, index_R: Tensor | None
) -> tuple[Quantised | None, Quantised | None]:
    """Of tiles that are not in use, nothing is written."""
    tile_count = len(tiles.tiles_M4)
    d = source_ND.shape[1]
    blocks = triton.cdiv(d, BLOCK)
    by_row = empty_copy(source_ND, rows, rule, (tiles.padded_rows, d), (blocks, tiles.padded_rows))
    by_column = empty_copy(source_ND, columns, rule, (tile_count, d, BLOCK), (tile_count, d))
    inputs = (source_ND.contiguous(), tiles.tiles_M4, index_R)
    constants = (kind_of_scales(rows), kind_of_scales(columns), rule.format.largest, rule.power_of_two)
    grid = (tile_count, blocks)
    quantise_tiles_kernel[grid](*inputs, *by_row, *by_column, tile_count, d, *constants, num_warps=WARPS)
    return named_copies(*by_row, *by_column)


def launch_tile_maxima(source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of each row, (P,), and of each column within each tile, (M, D)."""
    tile_count = len(tiles.tiles_M4)
    d = source_ND.shape[1]
    blocks = triton.cdiv(d, BLOCK)
    parts_BP = source_ND.new_empty(blocks, tiles.padded_rows, dtype=torch.float32)
    columns_MD = source_ND.new_empty(tile_count, d, dtype=torch.float32)
    inputs = (source_ND.contiguous(), tiles.tiles_M4, index_R)
    tile_maxima_kernel[tile_count, blocks](*inputs, parts_BP, columns_MD, tile_count, d, num_warps=WARPS)
    return parts_BP.amax(0), columns_MD
