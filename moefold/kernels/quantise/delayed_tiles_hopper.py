"""Quantisation of rows in tiles with scales of experts in Gluon. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns, 64 rows at a time, all loaded before the first are used. A thread
has 4 rows of 8 columns, and eight neighbouring threads 32 rows: their 32 bytes of a column are contiguous in the
transposed copy. It keeps its columns in both rounds, so their factors and largest magnitudes stay in registers.

Values beyond the scale of their channel are counted as they are made, as many columns have some: the largest magnitude
of a channel changes from step to step. Those beyond the scale of their expert, which are rare, are counted from a
second read, and only where there are any.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal

ROWS = constexpr(64)  # of a round
COLUMNS_OF_THREAD = [[0, 1], [0, 2], [0, 4]]
ROWS_OF_THREAD = [[1, 0], [2, 0]]
LANES = [[4, 0], [8, 0], [16, 0], [0, 8], [0, 16]]
WARPS = [[0, 32], [0, 64], [32, 0]]


def round_layout(of_thread: list[list[int]]) -> constexpr:
    layout = gl.DistributedLinearLayout(of_thread, LANES, WARPS, [], [64, 128])
    return constexpr(layout)


LAYOUT = round_layout(COLUMNS_OF_THREAD + ROWS_OF_THREAD)
BY_COLUMN = round_layout(ROWS_OF_THREAD + COLUMNS_OF_THREAD)  # the same places
OF_ROWS = constexpr(gl.SliceLayout(1, LAYOUT))
OF_COLUMNS = constexpr(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def leaves_range(most, factor, SATURATES: constexpr):
    """1 for each column whose largest scaled value is beyond the range, or no number."""
    inside = most * factor <= SATURATES
    return gl.where(inside, 0, 1)


@gluon.jit
def round_rows(PLACES: constexpr):
    """0 to 63, one for each row of a round."""
    return gl.arange(0, ROWS, layout=gl.SliceLayout(1, PLACES))


@gluon.jit
def tile_columns(PLACES: constexpr):
    """0 to 127, one for each column."""
    return gl.arange(0, 128, layout=gl.SliceLayout(0, PLACES))


@gluon.jit
def real_columns(first, D: constexpr, PLACES: constexpr):
    """Which columns exist: the compiler knows it where whole programs do."""
    c = tile_columns(PLACES)
    if D % 128 == 0:
        return c >= 0
    return first + c < D


@gluon.jit
def load_round(source_ND, index_R, row, real, i: constexpr, first, D: constexpr):
    """The values of a round as they are stored, zero where there is no row or no column."""
    r = round_rows(LAYOUT) + i * ROWS
    inside = r < real
    n = row + r
    if index_R is not None:
        n = gl.load(index_R + n, mask=inside, other=-1).to(gl.int32)
        inside = n >= 0
    line = source_ND + n.to(gl.int64) * D + first
    c = tile_columns(LAYOUT)
    there = inside[:, None] & real_columns(first, D, LAYOUT)[None, :]
    return gl.load(line[:, None] + c[None, :], mask=there, other=0.0)


@gluon.jit
def load_rounds(source_ND, index_R, row, real, first, D: constexpr):
    x0 = load_round(source_ND, index_R, row, real, 0, first, D)
    x1 = load_round(source_ND, index_R, row, real, 1, first, D)
    return x0, x1


@gluon.jit
def row_places(D: constexpr):
    """Row r, column c: r * D + c. The rows of a thread follow each other by a number that the compiler knows, so that
    one address serves all of its stores; in 64 bits, in which it may split the sum."""
    r = round_rows(LAYOUT)
    c = tile_columns(LAYOUT)
    of_lane = (r & 60).to(gl.int64) * D
    of_thread = (r & 3).to(gl.int64) * D
    line = of_lane[:, None] + c[None, :].to(gl.int64)
    return line + of_thread[:, None]


@gluon.jit
def column_places():
    """Row r, column c in the transposed copy: 128 c + r."""
    r = round_rows(BY_COLUMN)
    c = tile_columns(BY_COLUMN)
    of_lane = (c & 120).to(gl.int64) * 128
    of_thread = (c & 7).to(gl.int64) * 128
    line = of_lane[None, :] + r[:, None].to(gl.int64)
    return line + of_thread[None, :]


@gluon.jit
def store_row_copy(q, at, first, D: constexpr):
    rounded = q.to(at.dtype.element_ty)
    every_row = round_rows(LAYOUT) >= 0
    there = every_row[:, None] & real_columns(first, D, LAYOUT)[None, :]
    gl.store(at + row_places(D), rounded, mask=there)


@gluon.jit
def store_column_copy(q, at, first, D: constexpr):
    """A thread's rows of a column are rounded together: they are neighbours in a word of the transposed copy."""
    by_column = gl.convert_layout(q, BY_COLUMN)
    rounded = by_column.to(at.dtype.element_ty)
    every_row = round_rows(BY_COLUMN) >= 0
    there = every_row[:, None] & real_columns(first, D, BY_COLUMN)[None, :]
    gl.store(at + column_places(), rounded, mask=there)


@gluon.jit
def by_rows_of_thread(x):
    """A round as 16 lanes' rows, 4 rows each: the second dim lies within a thread."""
    shape: constexpr = [16, 4, 128]
    return x.reshape(shape)


@gluon.jit
def columns_of_threads(x):
    """The largest magnitudes of columns, of each thread's rows."""
    magnitude = by_rows_of_thread(gl.abs(x))
    return gl.reduce(magnitude, 1, larger_magnitude)


@gluon.jit
def count_of_thread(q, SATURATES: constexpr):
    """How many of each thread's scaled values are beyond the range."""
    beyond = gl.where(gl.abs(q) > SATURATES, 1, 0)
    shape: constexpr = [16, 4, 16, 8]
    of_rows = gl.sum(beyond.reshape(shape), 3)
    return gl.sum(of_rows, 1)


@gluon.jit
def no_counts():
    zero = gl.full([ROWS, 128], 0.0, gl.float32, LAYOUT)
    return count_of_thread(zero, 1.0)


@gluon.jit
def add_count(at, counts):
    total = gl.sum(gl.sum(counts, 1), 0)
    gl.atomic_add(at, total.to(gl.int64))  # whole numbers: the same in any order


@gluon.jit
def factor_of_expert(scale):
    of_columns = gl.full([128], scale, gl.float32, OF_COLUMNS)
    return reciprocal(of_columns)


@gluon.jit
def load_column_scales(columns_EC, of_expert, expert, first, D: constexpr, C: constexpr):
    """The scales of an expert's channels, or its one scale for each."""
    if C == 1:
        return gl.full([128], of_expert, gl.float32, OF_COLUMNS)
    line = columns_EC + expert.to(gl.int64) * C + first
    return gl.load(line + tile_columns(LAYOUT), mask=real_columns(first, D, LAYOUT), other=1.0)


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
    D: constexpr,
    C: constexpr,
    LARGEST: constexpr,
    SATURATES: constexpr,
):
    """Either copy may be absent, with its scales."""
    ROW_COPY: constexpr = values_PD is not None
    COLUMN_COPY: constexpr = values_MDB is not None
    BY_CHANNEL: constexpr = COLUMN_COPY and C > 1
    m = gl.program_id(0)
    block = gl.program_id(1)
    tile = tiles_M4 + 4 * m
    expert = gl.load(tile)
    row = gl.load(tile + 1)
    real = gl.load(tile + 2)
    if real > 0:  # in use
        first = block * 128
        rounds = load_rounds(source_ND, index_R, row, real, first, D)
        # scales
        of_expert = gl.load(rows_E + expert)
        row_factor = factor_of_expert(of_expert)
        wide_m = m.to(gl.int64)
        line_MD = wide_m * D + first
        c = tile_columns(LAYOUT)
        real_c = real_columns(first, D, LAYOUT)
        if COLUMN_COPY:
            column_scale = load_column_scales(columns_EC, of_expert, expert, first, D, C)
            column_factor = reciprocal(column_scale)
            gl.store(scales_MD + line_MD + c, column_scale, mask=real_c)
        if ROW_COPY:
            r = round_rows(LAYOUT)
            row_scale = gl.full([ROWS], of_expert, gl.float32, OF_ROWS)
            for i in gl.static_range(2):
                gl.store(scales_P + wide_m * 128 + i * ROWS + r, row_scale, mask=(r >= 0) & (block == 0))
        # copies, largest magnitudes of columns
        most = columns_of_threads(gl.full([ROWS, 128], 0.0, gl.float32, LAYOUT))
        beyond = no_counts()
        for i in gl.static_range(2):
            x = rounds[i].to(gl.float32)
            most = larger_magnitude(most, columns_of_threads(x))
            if ROW_COPY:
                q = x * row_factor[None, :]
                store_row_copy(q, values_PD + (wide_m * 128 + i * ROWS) * D + first, first, D)
            if COLUMN_COPY:
                q = x * column_factor[None, :]
                store_column_copy(q, values_MDB + line_MD * 128 + i * ROWS, first, D)
                if BY_CHANNEL:
                    beyond += count_of_thread(q, SATURATES)
        largest = gl.reduce(most, 0, larger_magnitude)
        largest = gl.convert_layout(largest, OF_COLUMNS)
        gl.store(maxima_MD + line_MD + c, largest, mask=real_c)
        # saturated values
        if BY_CHANNEL:
            add_count(saturated, beyond)
        WITH_EXPERT_SCALE: constexpr = int(ROW_COPY) + int(COLUMN_COPY and not BY_CHANNEL)  # copies
        if WITH_EXPERT_SCALE > 0:
            leaving = leaves_range(largest, row_factor, SATURATES)
            if gl.sum(leaving, 0) > 0:
                again = load_rounds(source_ND, index_R, row, real, first, D)
                counts = no_counts()
                for i in gl.static_range(2):
                    q = again[i].to(gl.float32) * row_factor[None, :]
                    counts += WITH_EXPERT_SCALE * count_of_thread(q, SATURATES)
                add_count(saturated, counts)
