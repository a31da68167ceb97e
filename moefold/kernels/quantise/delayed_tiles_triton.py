"""Quantisation of rows in tiles with scales of experts, and largest magnitudes of experts, in Triton, with the launches
of both languages. Imported only where Triton is.

N source rows, P padded rows in M tiles, D width, E experts, C channels with scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Copies, ScaleRule
from moefold.kernels.quantise.fp8_triton import load_scales, magnitude_bits, magnitude_of_bits
from moefold.kernels.quantise.quantise_tiles_triton import ROOM, named_copies, store_column_copy, store_row_copy
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.tiles_triton import load_tile_index
from moefold.kernels.routing.rows_triton import load_source_rows
from moefold.kernels.tile_triton import load_or_zero, numbers_from, program_block, store_inside, tile_mask

TILES = 16  # of an expert, read at a time
COLUMNS = 128  # of one program


@triton.jit
def count_beyond(x, factor, SATURATES: constexpr):
    magnitude = tl.abs(x * factor)
    is_beyond = magnitude > SATURATES
    of_rows = tl.sum(is_beyond.to(tl.int32), 1)
    return tl.sum(of_rows, 0)


@triton.jit
def quantise_delayed_kernel(
    source_ND,
    tiles_M4,
    index_R,
    rows_E,
    columns_EC,
    values_PD,
    scales_P,
    values_MDB,
    scales_MD,
    maxima_MD,
    saturated,
    D,
    C,
    LARGEST: constexpr,
    SATURATES: constexpr,
    BLOCK: constexpr,
):
    """One program takes 128 rows (a tile) by 128 columns. Either copy may be absent, with its scales."""
    m = tl.program_id(0)
    tile = tiles_M4 + 4 * m
    expert = tl.load(tile)
    real = tl.load(tile + 2)
    if real == 0:  # not in use
        return
    r = tl.arange(0, BLOCK)
    n = load_tile_index(tile, index_R, r)
    c = program_block(1, BLOCK)
    real_c = c < D
    source = load_source_rows(source_ND, n, c, D)
    x = source.to(tl.float32)
    # largest magnitudes of columns
    wide_m = m.to(tl.int64)
    at_MD = wide_m * D + c
    bits = magnitude_bits(x)
    largest = tl.max(bits, 0)
    most = magnitude_of_bits(largest)
    store_inside(maxima_MD + at_MD, most, real_c)
    # copies
    total = tl.zeros([], tl.int32)
    p = wide_m * BLOCK + r
    if values_PD is not None:
        scale = tl.load(rows_E + expert)
        row_scales = tl.full([BLOCK], 1.0, tl.float32) * scale
        store_inside(scales_P + p, row_scales, (r < BLOCK) & (tl.program_id(1) == 0))
        store_row_copy(x, row_scales, values_PD, p, c, D, LARGEST)
        factor = tl.div_rn(1.0, row_scales)
        total += count_beyond(x, factor[:, None], SATURATES)
    if values_MDB is not None:
        channel = tl.minimum(c, C - 1)
        line = columns_EC + expert.to(tl.int64) * C
        scale = load_scales(line + channel, real_c)
        store_inside(scales_MD + at_MD, scale, real_c)
        store_column_copy(x, scale, values_MDB, wide_m, c, D, LARGEST)
        factor = tl.div_rn(1.0, scale)
        total += count_beyond(x, factor[None, :], SATURATES)
    if total > 0:
        tl.atomic_add(saturated, total.to(tl.int64))  # whole numbers: the same in any order


@triton.jit
def note_maxima_kernel(
    maxima_MD, first_tile_E, used, experts_E, channels_ED, D, E, TILES: constexpr, COLUMNS: constexpr
):
    """One expert and some columns. Maxima, which are not negative, are compared as bits of integers."""
    e = tl.program_id(0)
    c = program_block(1, COLUMNS)
    real_c = c < D
    at = first_tile_E + e
    first = tl.load(at)
    tiles_in_use = tl.load(used)
    last = tl.load(at + 1, mask=e + 1 < E, other=tiles_in_use)
    most = tl.zeros([TILES, COLUMNS], tl.int32)
    for start in range(first, last, TILES):
        m = numbers_from(start, TILES)
        line = maxima_MD + m.to(tl.int64)[:, None] * D
        inside = tile_mask(m < last, real_c)
        found = load_or_zero(line + c[None, :], inside)
        most = tl.maximum(most, found)
    of_columns = tl.max(most, 0)
    if channels_ED is not None:
        at = channels_ED + e.to(tl.int64) * D + c
        before = load_or_zero(at, real_c)
        after = tl.maximum(before, of_columns)
        store_inside(at, after, real_c)
    of_expert = tl.max(of_columns, 0)
    tl.atomic_max(experts_E + e, of_expert)  # the same in any order


class DelayedKernel(NamedTuple):
    """The kernel in one language, and its further arguments."""

    quantise: Any
    options: dict[str, int]


MadeTiles = tuple[Copies, Tensor, Tensor]  # copies along rows and columns, maxima, saturated values

TRITON_KERNEL = DelayedKernel(quantise_delayed_kernel, ROOM | {"BLOCK": BLOCK})


def launch_quantise_delayed(
    kernel: DelayedKernel,
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    scales: tuple[Tensor, Tensor],
    rows: bool,
    columns: bool,
    index_R: Tensor | None,
) -> MadeTiles:
    """Of tiles that are not in use, nothing is written. `scales`: those of rows, and of columns."""
    tile_count = len(tiles.tiles_M4)
    d = source_ND.shape[1]
    padded = tiles.padded_rows
    _, columns_EC = scales
    channels = columns_EC.shape[1]
    # room for what is made
    make = source_ND.new_empty
    dtype = rule.format.dtype
    by_row = by_column = (None, None)
    if rows:
        by_row = (make(padded, d, dtype=dtype), make(padded, dtype=torch.float32))
    if columns:
        by_column = (make(tile_count, d, BLOCK, dtype=dtype), make(tile_count, d, dtype=torch.float32))
    maxima_MD = make(tile_count, d, dtype=torch.float32)
    saturated_1 = torch.zeros(1, dtype=torch.int64, device=source_ND.device)
    # the launch
    scale_tables = [table.contiguous() for table in scales]
    given = (source_ND.contiguous(), tiles.tiles_M4, index_R, *scale_tables)
    made = (*by_row, *by_column, maxima_MD, saturated_1)
    constants = (rule.format.largest, rule.format.saturates)
    launch = kernel.quantise[tile_count, triton.cdiv(d, BLOCK)]
    launch(*given, *made, d, channels, *constants, **kernel.options)
    copies = named_copies(*by_row, *by_column)
    return copies, maxima_MD, saturated_1


def launch_note_maxima(maxima_MD: Tensor, tiles: RowTiles, experts_E: Tensor, channels_ED: Tensor | None) -> None:
    d = maxima_MD.shape[1]
    experts = len(tiles.ends_E)
    most_MD = maxima_MD.view(torch.int32)
    most_E = experts_E.view(torch.int32)
    most_ED = None if channels_ED is None else channels_ED.view(torch.int32)
    launch = note_maxima_kernel[experts, triton.cdiv(d, COLUMNS)]
    launch(most_MD, tiles.first_tile_E, tiles.count, most_E, most_ED, d, experts, TILES, COLUMNS)
