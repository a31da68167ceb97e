"""Quantisation of rows in tiles, and largest magnitudes of tiles, in Gluon. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns. A thread has 16 rows of 4 columns, and a pair of threads 32 rows:
their 32 bytes of a column are contiguous in the transposed copy, so that no value moves between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal, scale_from_amax

COLUMNS_OF_THREAD = [[0, 1], [0, 2]]
ROWS_OF_THREAD = [[1, 0], [2, 0], [4, 0], [8, 0]]
LANES = [[16, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
WARPS = [[32, 0], [64, 0], [0, 64]]
ROWS_FIRST = ROWS_OF_THREAD + COLUMNS_OF_THREAD
COLUMNS_FIRST = COLUMNS_OF_THREAD + ROWS_OF_THREAD
TILE = [128, 128]


def tile_layout(values_of_thread: list[list[int]]) -> constexpr:
    blocks: list[list[int]] = []
    layout = gl.DistributedLinearLayout(values_of_thread, LANES, WARPS, blocks, TILE)
    return constexpr(layout)


TILE_LAYOUT = tile_layout(COLUMNS_FIRST)
BY_COLUMN = tile_layout(ROWS_FIRST)  # the same places


@gluon.jit
def wide_program_id(AXIS: constexpr):
    return gl.program_id(AXIS).to(gl.int64)


@gluon.jit
def load_scales(at, inside):
    """Scales, 1 where there are none."""
    return gl.load(at, mask=inside, other=1.0)


@gluon.jit
def tile_rows(LAYOUT: constexpr):
    """0 to 127, one for each row of a tile."""
    rows: constexpr = gl.SliceLayout(1, LAYOUT)
    return gl.arange(0, 128, layout=rows)


@gluon.jit
def tile_columns(LAYOUT: constexpr):
    """This program's columns."""
    columns: constexpr = gl.SliceLayout(0, LAYOUT)
    first = gl.program_id(1) * 128
    places = gl.arange(0, 128, layout=columns)
    return first + places


@gluon.jit
def existing_columns(r, c, D):
    """Which elements exist: those of every row, and of columns below D."""
    row_there = r >= 0
    column_there = c < D
    return row_there[:, None] & column_there[None, :]


@gluon.jit
def load_tile(source_ND, tiles_M4, index_R, m, D):
    """128 x 128 values in fp32, zero where there is no row or no column."""
    r = tile_rows(TILE_LAYOUT)
    c = tile_columns(TILE_LAYOUT)
    return load_rows(source_ND, tiles_M4, index_R, m, r, c, D)


@gluon.jit
def load_rows(source_ND, tiles_M4, index_R, m, r, c, D):
    """Some rows and columns of a tile."""
    # the rows' places in the source
    tile = tiles_M4 + 4 * m
    row = gl.load(tile + 1)
    real = gl.load(tile + 2)
    n = row + r
    inside = r < real
    if index_R is not None:
        index_at = index_R + n
        index = gl.load(index_at, mask=inside, other=-1)
        n = index.to(gl.int32)
        inside = n >= 0
    # their values
    wide_n = n.to(gl.int64)
    first = wide_n * D
    line = source_ND + first[:, None]
    at = line + c[None, :]
    column_there = c < D
    mask = inside[:, None] & column_there[None, :]
    values = gl.load(at, mask=mask, other=0.0)
    return values.to(gl.float32)


@gluon.jit
def largest_magnitudes(x, AXIS: constexpr):
    return gl.reduce(x, AXIS, larger_magnitude)


@gluon.jit
def quantise_rows(x, values_PD, row_scales, m, M, D, SCALES: constexpr, LARGEST: constexpr, POWER_OF_TWO: constexpr):
    """Scales of this block of each row, computed or given, and its values."""
    r = tile_rows(TILE_LAYOUT)
    first = m.to(gl.int64) * 128
    if SCALES == "block":
        magnitudes = gl.abs(x)
        amax = largest_magnitudes(magnitudes, 1)
        scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
        block = wide_program_id(1)
        line = row_scales + block * (M * 128)
        scale_at = line + first + r
        gl.store(scale_at, scale)
    else:
        scale = gl.load(row_scales + first + r)
    factor = reciprocal(scale)
    store_rows(x, factor, values_PD, m, D)


@gluon.jit
def store_rows(x, factor, values_PD, m, D):
    """The copy along rows, whose scales are the reciprocals of the factors."""
    r = tile_rows(TILE_LAYOUT)
    c = tile_columns(TILE_LAYOUT)
    first = m.to(gl.int64) * 128
    q = x * factor[:, None]
    row_start = (first + r) * D
    line = values_PD + row_start[:, None]
    at = line + c[None, :]
    mask = existing_columns(r, c, D)
    rounded = q.to(values_PD.dtype.element_ty)
    gl.store(at, rounded, mask=mask)


@gluon.jit
def quantise_columns(
    x, values_MDB, column_scales_MD, m, D, SCALES: constexpr, LARGEST: constexpr, POWER_OF_TWO: constexpr
):
    """Scales of each column of this tile, computed or given, and its values, transposed."""
    c = tile_columns(TILE_LAYOUT)
    wide_m = m.to(gl.int64)
    scale_at = column_scales_MD + wide_m * D + c
    if SCALES == "block":
        magnitudes = gl.abs(x)
        amax = largest_magnitudes(magnitudes, 0)
        scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
        gl.store(scale_at, scale, mask=c < D)
    else:
        scale = load_scales(scale_at, c < D)
    factor = reciprocal(scale)
    store_columns(x, factor, values_MDB, m, D)


@gluon.jit
def store_columns(x, factor, values_MDB, m, D):
    """The copy along columns, transposed."""
    q = x * factor[None, :]
    by_column = gl.convert_layout(q, BY_COLUMN)
    rounded = by_column.to(values_MDB.dtype.element_ty)  # a thread's rows, which are neighbours in its words
    r = tile_rows(BY_COLUMN)
    c = tile_columns(BY_COLUMN)
    column_start = c * 128
    place = column_start[None, :] + r[:, None]
    first = m.to(gl.int64) * 128
    mask = existing_columns(r, c, D)
    at = values_MDB + first * D + place
    gl.store(at, rounded, mask=mask)


@gluon.jit
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
):
    """ROWS: "block" (scales (B, P)), "given" (scales (P,)) or None. COLUMNS: the same, with scales (M, D) for both."""
    m = gl.program_id(0)
    tile = tiles_M4 + 4 * m
    real = gl.load(tile + 2)
    if real > 0:  # in use
        x = load_tile(source_ND, tiles_M4, index_R, m, D)
        if ROWS is not None:
            quantise_rows(x, values_PD, row_scales, m, M, D, ROWS, LARGEST, POWER_OF_TWO)
        if COLUMNS is not None:
            quantise_columns(x, values_MDB, column_scales_MD, m, D, COLUMNS, LARGEST, POWER_OF_TWO)


@gluon.jit
def tile_maxima_kernel(source_ND, tiles_M4, index_R, parts_BP, columns_MD, M, D):
    """Largest magnitudes within 128 columns of each row, where there is room for them, and of each column. A tile not
    in use has zeros."""
    m = gl.program_id(0)
    x = load_tile(source_ND, tiles_M4, index_R, m, D)
    magnitudes = gl.abs(x)
    r = tile_rows(TILE_LAYOUT)
    c = tile_columns(TILE_LAYOUT)
    # of rows
    if parts_BP is not None:
        line = wide_program_id(1) * (M * 128)
        row_at = parts_BP + line + m * 128 + r
        of_rows = largest_magnitudes(magnitudes, 1)
        gl.store(row_at, of_rows)
    # of columns
    wide_m = m.to(gl.int64)
    column_at = columns_MD + wide_m * D + c
    of_columns = largest_magnitudes(magnitudes, 0)
    gl.store(column_at, of_columns, mask=c < D)
