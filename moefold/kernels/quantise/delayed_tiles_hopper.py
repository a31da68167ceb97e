"""Quantisation of rows in tiles with scales of experts in Gluon, with the layout of quantise_tiles_hopper.py. Imported
only where Triton is.

Values are counted one by one only where the largest of a column leaves the range.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

from moefold.kernels.quantise.fp8_hopper import reciprocal
from moefold.kernels.quantise.quantise_tiles_hopper import (
    TILE_LAYOUT,
    largest_magnitudes,
    load_rows,
    load_scales,
    load_tile,
    store_columns,
    store_rows,
    tile_columns,
    tile_rows,
)

STRIP = constexpr(16)  # rows that are counted at a time
STRIP_LAYOUT = constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
OF_ROWS = constexpr(gl.SliceLayout(1, TILE_LAYOUT))
OF_COLUMNS = constexpr(gl.SliceLayout(0, TILE_LAYOUT))


@gluon.jit
def leaves_range(most, factor, SATURATES: constexpr):
    """1 for each column whose largest scaled value is beyond the range, or no number."""
    inside = most * factor <= SATURATES
    return gl.where(inside, 0, 1)


@gluon.jit
def scales_of_columns(columns_EC, expert, c, C, D):
    """The scales of an expert's channels, or its one scale for each."""
    channel = gl.minimum(c, C - 1)
    line = columns_EC + expert.to(gl.int64) * C
    return load_scales(line + channel, c < D)


@gluon.jit
def count_beyond(x, scale, SATURATES: constexpr):
    """How many values are beyond the range of their column's scale, by column."""
    factor = reciprocal(scale)
    magnitude = gl.abs(x * factor[None, :])
    beyond = gl.where(magnitude > SATURATES, 1, 0)
    return gl.sum(beyond, 0)


@gluon.jit
def count_saturated(
    source_ND, tiles_M4, index_R, rows_E, columns_EC, m, D, C, ROWS: constexpr, COLUMNS: constexpr, SATURATES: constexpr
):
    """The values of a tile in both copies that are beyond the range, read once more, a few rows at a time: to hold them
    would take registers of all programs."""
    expert = gl.load(tiles_M4 + 4 * m)
    c = tile_columns(STRIP_LAYOUT)
    counts = gl.full([128], 0, gl.int32, gl.SliceLayout(0, STRIP_LAYOUT))
    for first in range(0, 128, STRIP):
        r = first + gl.arange(0, STRIP, layout=gl.SliceLayout(1, STRIP_LAYOUT))
        x = load_rows(source_ND, tiles_M4, index_R, m, r, c, D)
        if ROWS:
            of_expert = gl.load(rows_E + expert)
            scale = gl.full([128], of_expert, gl.float32, gl.SliceLayout(0, STRIP_LAYOUT))
            counts += count_beyond(x, scale, SATURATES)
        if COLUMNS:
            scale = scales_of_columns(columns_EC, expert, c, C, D)
            counts += count_beyond(x, scale, SATURATES)
    return gl.sum(counts, 0)


@gluon.jit
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
):
    """One program takes 128 rows (a tile) by 128 columns. Either copy may be absent, with its scales."""
    m = gl.program_id(0)
    tile = tiles_M4 + 4 * m
    expert = gl.load(tile)
    real = gl.load(tile + 2)
    if real > 0:  # in use
        c = tile_columns(TILE_LAYOUT)
        real_c = c < D
        # scales, before the values: these take longer
        if values_PD is not None:
            of_expert = gl.load(rows_E + expert)
        if values_MDB is not None:
            column_scale = scales_of_columns(columns_EC, expert, c, C, D)
        x = load_tile(source_ND, tiles_M4, index_R, m, D)
        # largest magnitudes of columns
        at_MD = m.to(gl.int64) * D + c
        magnitudes = gl.abs(x)
        most = largest_magnitudes(magnitudes, 0)
        gl.store(maxima_MD + at_MD, most, mask=real_c)
        # copies
        leaving = gl.full([128], 0, gl.int32, OF_COLUMNS)
        if values_PD is not None:
            row_scale = gl.full([128], of_expert, gl.float32, OF_ROWS)
            p = m * 128 + tile_rows(TILE_LAYOUT)
            gl.store(scales_P + p, row_scale, mask=(p >= 0) & (gl.program_id(1) == 0))
            row_factor = reciprocal(row_scale)
            store_rows(x, row_factor, values_PD, m, D)
            same = gl.full([128], of_expert, gl.float32, OF_COLUMNS)
            leaving += leaves_range(most, reciprocal(same), SATURATES)
        if values_MDB is not None:
            gl.store(scales_MD + at_MD, column_scale, mask=real_c)
            column_factor = reciprocal(column_scale)
            store_columns(x, column_factor, values_MDB, m, D)
            leaving += leaves_range(most, column_factor, SATURATES)
        if gl.sum(leaving, 0) > 0:
            ROWS: constexpr = values_PD is not None
            COLUMNS: constexpr = values_MDB is not None
            total = count_saturated(source_ND, tiles_M4, index_R, rows_E, columns_EC, m, D, C, ROWS, COLUMNS, SATURATES)
            gl.atomic_add(saturated, total.to(gl.int64))  # whole numbers: the same in any order
