"""Quantisation of rows in tiles, and largest magnitudes of tiles, in Triton. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns: it reads its values once and writes what is wanted of rows, columns.

N source rows, P padded rows in M tiles, D width, B blocks of 128 columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Copies, Quantised, ScaleRule
from moefold.kernels.quantise.fp8_triton import (
    load_scales,
    magnitude_bits,
    magnitude_of_bits,
    round_to_fp8,
    scale_from_bits,
)
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.tiles_triton import load_tile_index
from moefold.kernels.routing.rows_triton import load_source_rows
from moefold.kernels.tile_triton import program_block, tile_mask, tile_pointers, wide_program_id

ROOM = {"num_warps": 16, "maxnreg": 64}  # two programs share a multiprocessor: one loads while the other stores
Scales = Tensor | str | None  # as the op takes them


@triton.jit
def scale_of_lines(bits, at, inside, AXIS: constexpr, KIND: constexpr, LARGEST: constexpr, POWER_OF_TWO: constexpr):
    """Scales along an axis of the tile: made and stored ("block"), or loaded ("given")."""
    if KIND == "block":
        largest = tl.max(bits, AXIS)
        scale = scale_from_bits(largest, LARGEST, POWER_OF_TWO)
        tl.store(at, scale, mask=inside)
    else:
        scale = load_scales(at, inside)
    return scale


@triton.jit
def store_row_copy(x, scale, values_PD, p, c, D, LARGEST: constexpr):
    """Columns c of padded rows p."""
    FORMAT: constexpr = values_PD.dtype.element_ty
    q = round_to_fp8(x, scale[:, None], LARGEST, FORMAT)
    at = tile_pointers(values_PD, p, c, D)
    inside = tile_mask(p >= 0, c < D)
    tl.store(at, q, mask=inside)


@triton.jit
def store_column_copy(x, scale, values_MDB, wide_m, c, D, LARGEST: constexpr):
    """Columns c of tile m, transposed."""
    FORMAT: constexpr = values_MDB.dtype.element_ty
    q = round_to_fp8(x, scale[None, :], LARGEST, FORMAT)
    rows: constexpr = x.shape[0]
    r = tl.arange(0, rows)
    values_DB = values_MDB + wide_m * D * rows
    at = tile_pointers(values_DB, c, r, rows)
    inside = tile_mask(c < D, r >= 0)
    transposed = tl.trans(q)
    tl.store(at, transposed, mask=inside)


@triton.jit
def quantise_tiles_kernel(
    source_ND,
    tiles_M4,
    index_R,
    values_PD,
    row_scales,
    values_MDB,
    column_scales_MD,
    M,
    D,
    ROWS: constexpr,
    COLUMNS: constexpr,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    BLOCK: constexpr,
):
    """ROWS: "block" (scales (B, P)), "given" (scales (P,)) or None. COLUMNS: the same, with scales (M, D) for both."""
    m = tl.program_id(0)
    tile = tiles_M4 + 4 * m
    real = tl.load(tile + 2)
    if real == 0:  # not in use
        return
    # the values, zero where there is no row or no column
    r = tl.arange(0, BLOCK)
    n = load_tile_index(tile, index_R, r)
    c = program_block(1, BLOCK)
    source = load_source_rows(source_ND, n, c, D)
    x = source.to(tl.float32)
    bits = magnitude_bits(x)
    # where they go: every row of the tile, columns that exist
    wide_m = m.to(tl.int64)
    p = wide_m * BLOCK + r
    P = M * BLOCK
    every_r = r < BLOCK
    real_c = c < D
    if ROWS is not None:
        scale_at = row_scales + p
        if ROWS == "block":
            scale_at += wide_program_id(1) * P
        scale = scale_of_lines(bits, scale_at, every_r, 1, ROWS, LARGEST, POWER_OF_TWO)
        store_row_copy(x, scale, values_PD, p, c, D, LARGEST)
    if COLUMNS is not None:
        scale_at = column_scales_MD + wide_m * D + c
        scale = scale_of_lines(bits, scale_at, real_c, 0, COLUMNS, LARGEST, POWER_OF_TWO)
        store_column_copy(x, scale, values_MDB, wide_m, c, D, LARGEST)


@triton.jit
def tile_maxima_kernel(source_ND, tiles_M4, index_R, parts_BP, columns_MD, M, D, BLOCK: constexpr):
    """Largest magnitudes within 128 columns of each row, where there is room for them, and of each column. A tile not
    in use has zeros."""
    m = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    tile = tiles_M4 + 4 * m
    n = load_tile_index(tile, index_R, r)
    c = program_block(1, BLOCK)
    source = load_source_rows(source_ND, n, c, D)
    x = source.to(tl.float32)
    bits = magnitude_bits(x)
    # of rows, at (b, p)
    if parts_BP is not None:
        largest = tl.max(bits, 1)
        part = magnitude_of_bits(largest)
        line = wide_program_id(1) * (M * BLOCK)
        at = parts_BP + line + m * BLOCK + r
        tl.store(at, part)
    # of columns, at (m, c)
    largest = tl.max(bits, 0)
    column = magnitude_of_bits(largest)
    line = wide_program_id(0) * D
    at = columns_MD + line + c
    tl.store(at, column, mask=c < D)


class TileKernels(NamedTuple):
    """The two kernels in one language, and their further arguments."""

    quantise: Any
    maxima: Any
    options: dict[str, int]


TRITON_KERNELS = TileKernels(quantise_tiles_kernel, tile_maxima_kernel, ROOM | {"BLOCK": BLOCK})


def launch_quantise_tiles(
    kernels: TileKernels,
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    rows: Scales,
    columns: Scales,
    index_R: Tensor | None,
) -> Copies:
    """Of tiles that are not in use, nothing is written."""
    tile_count = len(tiles.tiles_M4)
    d = source_ND.shape[1]
    blocks = triton.cdiv(d, BLOCK)
    padded = tiles.padded_rows
    source_ND = source_ND.contiguous()
    # room for both copies
    row_shape = (padded, d)
    by_row = empty_copy(source_ND, rows, rule, row_shape, (blocks, padded))
    column_shape = (tile_count, d, BLOCK)
    by_column = empty_copy(source_ND, columns, rule, column_shape, (tile_count, d))
    # the launch
    tensors = (source_ND, tiles.tiles_M4, index_R, *by_row, *by_column)
    kinds = (kind_of_scales(rows), kind_of_scales(columns))
    constants = (rule.format.largest, rule.power_of_two)
    quantise = kernels.quantise[tile_count, blocks]
    quantise(*tensors, tile_count, d, *kinds, *constants, **kernels.options)
    return named_copies(*by_row, *by_column)


def named_copies(
    values_PD: Tensor | None,
    row_scales: Tensor | None,
    values_MDB: Tensor | None,
    column_scales: Tensor | None,
) -> Copies:
    """Along rows and along columns, where there are values."""
    by_row = by_column = None
    if values_PD is not None and row_scales is not None:
        is_wide = row_scales.ndim == 1
        scales = row_scales[:, None] if is_wide else row_scales.T
        by_row = Quantised(values_PD, scales)
    if values_MDB is not None and column_scales is not None:
        by_column = Quantised(values_MDB, column_scales[..., None])
    return by_row, by_column


def empty_copy(
    source_ND: Tensor,
    scales: Scales,
    rule: ScaleRule,
    shape: tuple[int, ...],
    scales_shape: tuple[int, int],
) -> tuple[Tensor | None, Tensor | None]:
    """Room for values, and for scales where they are not given."""
    if scales is None:
        return None, None
    values = source_ND.new_empty(shape, dtype=rule.format.dtype)
    if isinstance(scales, Tensor):
        room = scales.contiguous()
    else:
        room = source_ND.new_empty(scales_shape, dtype=torch.float32)
    return values, room


def kind_of_scales(scales: Scales) -> str | None:
    return "given" if isinstance(scales, Tensor) else scales


def launch_tile_maxima(
    kernels: TileKernels, source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None, rows: bool
) -> tuple[Tensor | None, Tensor]:
    """Largest magnitudes of each row, (P,), where they are wanted, and of each column within each tile, (M, D)."""
    tile_count = len(tiles.tiles_M4)
    d = source_ND.shape[1]
    blocks = triton.cdiv(d, BLOCK)
    columns_MD = source_ND.new_empty(tile_count, d, dtype=torch.float32)
    parts_BP = columns_MD.new_empty(blocks, tiles.padded_rows) if rows else None
    source_ND = source_ND.contiguous()
    tensors = (source_ND, tiles.tiles_M4, index_R, parts_BP, columns_MD)
    find_maxima = kernels.maxima[tile_count, blocks]
    find_maxima(*tensors, tile_count, d, **kernels.options)
    rows_P = None if parts_BP is None else parts_BP.amax(0)
    return rows_P, columns_MD
