"""SwiGLU's gradient and its quantisation with scales of experts, in Gluon. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns of the gate and the same columns of up, 32 rows at a time, and once:
scales are known. A thread keeps its four columns in all four rounds, so their factors and largest magnitudes stay in
registers, and no thread waits for another before the end. It has 4 rows of 4 columns of a round, and eight neighbouring
threads 32 rows: their 32 bytes of a column are contiguous in the transposed copy. Factors of rows lie in shared memory.

Values beyond the scale of their channel are counted as they are made, as many columns have some: the largest magnitude
of a channel changes from step to step. Those beyond the scale of their expert, which are rare, are counted in a second
round, and only where there are any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moefold.kernels.experts.swiglu_tiles_hopper import (
    chunk_gradients,
    column_steps,
    load_or_zero,
    row_steps,
)
from moefold.kernels.quantise.delayed_tiles_hopper import leaves_range
from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal

ROWS = gl.constexpr(32)  # of a round
LANES = row_steps(4, 8, 16) + column_steps(4, 8)
WARPS = column_steps(16, 32, 64)
COLUMNS_OF_THREAD = column_steps(1, 2)
ROWS_OF_THREAD = row_steps(1, 2)


def round_layout(of_thread: list[list[int]]) -> gl.constexpr:
    layout = gl.DistributedLinearLayout(of_thread, LANES, WARPS, [], [32, 128])
    return gl.constexpr(layout)


LAYOUT = round_layout(COLUMNS_OF_THREAD + ROWS_OF_THREAD)
BY_COLUMN = round_layout(ROWS_OF_THREAD + COLUMNS_OF_THREAD)  # the same places
OF_ROWS = gl.constexpr(gl.SliceLayout(1, LAYOUT))
OF_COLUMNS = gl.constexpr(gl.SliceLayout(0, LAYOUT))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # of the tile's 128 rows
FACTOR_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
DOT_PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))  # a row's parts lie apart, its neighbours beside it
PARTS_OF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0]))


class TilePlace(NamedTuple):
    """A tile: its first row in the order without padding, its first padded row, its real rows, and its expert."""

    row: Any
    first: Any
    real: Any
    expert: Any


class RowFactors(NamedTuple):
    """What each row of a round is multiplied by: the gate, half of its scale; the activation, scale of up times weight;
    the gradient of up, the weight."""

    half_scale: Any
    up_weight: Any
    weight: Any


class ColumnScales(NamedTuple):
    """The scales of this program's columns of one tensor, and their reciprocals."""

    scale: Any
    factor: Any


@gluon.jit
def round_rows(PLACES: gl.constexpr):
    """0 to 31, one for each row of a round."""
    return gl.arange(0, ROWS, layout=gl.SliceLayout(1, PLACES))


@gluon.jit
def tile_columns(PLACES: gl.constexpr):
    """0 to 127, one for each column."""
    return gl.arange(0, 128, layout=gl.SliceLayout(0, PLACES))


@gluon.jit
def row_places(stride: gl.constexpr):
    """Row r, column c: r * stride + c. The rows of a thread follow each other by a number that the compiler knows, so
    that one address serves all of its accesses; in 64 bits, in which it may split the sum."""
    r = round_rows(LAYOUT)
    c = tile_columns(LAYOUT)
    of_lane = (r & 28).to(gl.int64) * stride
    of_thread = (r & 3).to(gl.int64) * stride
    line = of_lane[:, None] + c[None, :].to(gl.int64)
    return line + of_thread[:, None]


@gluon.jit
def column_places():
    """Row r, column c in the transposed copy: 128 c + r."""
    r = round_rows(BY_COLUMN)
    c = tile_columns(BY_COLUMN)
    of_lane = (c & 124).to(gl.int64) * 128
    of_thread = (c & 3).to(gl.int64) * 128
    line = of_lane[None, :] + r[:, None].to(gl.int64)
    return line + of_thread[None, :]


@gluon.jit
def store_row_copy(q, at, F: gl.constexpr):
    rounded = q.to(at.dtype.element_ty)
    gl.store(at + row_places(2 * F), rounded)


@gluon.jit
def store_column_copy(q, at):
    """A thread's rows of a column are rounded together: they are neighbours in a word of the transposed copy."""
    by_column = gl.convert_layout(q, BY_COLUMN)
    rounded = by_column.to(at.dtype.element_ty)
    gl.store(at + column_places(), rounded)


@gluon.jit
def by_rows_of_thread(x):
    """A round as 8 lanes' rows, 4 rows each: the second dim lies within a thread."""
    shape: gl.constexpr = [8, 4, 128]
    return x.reshape(shape)


@gluon.jit
def larger_columns(most, x):
    """The largest magnitudes of columns so far, of each thread's rows."""
    magnitude = by_rows_of_thread(gl.abs(x))
    found = gl.reduce(magnitude, 1, larger_magnitude)
    return larger_magnitude(most, found)


@gluon.jit
def zero_columns():
    zero = gl.full([ROWS, 128], 0.0, gl.float32, LAYOUT)
    return gl.sum(by_rows_of_thread(zero), 1)


@gluon.jit
def largest_of_lanes(most):
    whole = gl.reduce(most, 0, larger_magnitude)
    return gl.convert_layout(whole, OF_COLUMNS)


@gluon.jit
def count_of_thread(q, SATURATES: gl.constexpr):
    """How many of each thread's scaled values are beyond the range."""
    beyond = gl.where(gl.abs(q) > SATURATES, 1, 0)
    shape: gl.constexpr = [8, 4, 32, 4]
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
def scales_of_expert(scale):
    """Its one scale, for each column."""
    of_columns = gl.full([128], scale, gl.float32, OF_COLUMNS)
    return ColumnScales(of_columns, reciprocal(of_columns))


@gluon.jit
def load_column_scales(table_EC, of_expert, expert, channel, C: gl.constexpr):
    """Those of an expert's channels, or its one scale for each."""
    if C == 1:
        return of_expert
    line = table_EC + expert.to(gl.int64) * C + channel
    scale = gl.load(line + tile_columns(LAYOUT))
    return ColumnScales(scale, reciprocal(scale))


@gluon.jit
def keep_row_factors(buf, h_scales, weight_R, tile, block, P, F: gl.constexpr):
    """The factors of the tile's rows, to shared memory. Behind the real rows they are zero."""
    r = gl.arange(0, 128, layout=LINE)
    inside = r < tile.real
    w = load_or_zero(weight_R + tile.row + r, inside)
    gate_scale = gl.full([128], 1.0, gl.float32, LINE)
    up_scale = gate_scale
    if h_scales is not None:
        up_block = block + F // 128
        at = h_scales + tile.first + r
        gate_scale = load_or_zero(at + block.to(gl.int64) * P, inside)
        up_scale = load_or_zero(at + up_block.to(gl.int64) * P, inside)
    shape: gl.constexpr = [4, 1, 128]
    lines = buf._reinterpret(gl.float32, shape, FACTOR_LINES)
    keep_line(lines, 0, gate_scale * 0.5)
    keep_line(lines, 1, up_scale * w)
    keep_line(lines, 2, w)
    keep_line(lines, 3, up_scale)


@gluon.jit
def keep_line(lines, i: gl.constexpr, x):
    line = lines.index(i)
    place = line.reshape([128])
    place.store(x)


@gluon.jit
def load_factor(buf, kind: gl.constexpr, i, ROW_PLACES: gl.constexpr):
    """One of the factors of round i's rows."""
    line = buf.index(4 * kind + i)
    place = line.reshape([ROWS])
    return place.load(ROW_PLACES)


@gluon.jit
def load_row_factors(buf, i):
    half_scale = load_factor(buf, 0, i, OF_ROWS)
    up_weight = load_factor(buf, 1, i, OF_ROWS)
    weight = load_factor(buf, 2, i, OF_ROWS)
    return RowFactors(half_scale, up_weight, weight)


@gluon.jit
def load_round(da_at, h_at, i, real, F: gl.constexpr):
    """da, gate and up of round i, as they are stored."""
    there = round_rows(LAYOUT) + i * ROWS < real
    inside = there[:, None]
    d = load_or_zero(da_at + i * (ROWS * F) + row_places(F), inside)
    gate_at = h_at + i * (ROWS * 2 * F) + row_places(2 * F)
    g = load_or_zero(gate_at, inside)
    u = load_or_zero(gate_at + F, inside)
    return d, g, u


@gluon.jit
def round_gradients(d, g, u, of_rows):
    """The activation, the gradients of gate and up, and da times the activation without the factors of rows."""
    act, dot, dgate, dup = chunk_gradients(d, g, u, of_rows.half_scale)
    gate_weight = of_rows.up_weight * 0.5
    act *= of_rows.up_weight[:, None]
    dgate *= gate_weight[:, None]
    dup *= of_rows.weight[:, None]
    return act, dgate, dup, dot


@gluon.jit
def keep_dots(parts, i, dot):
    """What each warp's columns add to the rows of round i."""
    shape: gl.constexpr = [ROWS, 8, 16]
    of_warps = gl.sum(dot.reshape(shape), 2)
    place = parts.index(i)
    place.store(of_warps)


@gluon.jit
def store_dots(parts, factors, dots_R, tile):
    """The gradient of the rows' weights, from this program's columns."""
    r = round_rows(PARTS_OF_ROWS)
    for i in gl.static_range(4):
        place = parts.index(i)
        of_warps = place.load(PARTS_OF_ROWS)
        dot = gl.sum(of_warps, 1)
        up_scale = load_factor(factors, 3, i, gl.SliceLayout(1, PARTS_OF_ROWS))
        row = i * ROWS + r
        gl.store(dots_R + tile.row + row, dot * up_scale, mask=row < tile.real)


@gluon.jit
def store_column_facts(most, scale, maxima, scales):
    c = tile_columns(LAYOUT)
    gl.store(maxima + c, most)
    gl.store(scales + c, scale)


@gluon.jit
def quantise_delayed_gradient_kernel(
    da_RF,
    h_PN,
    h_scales,
    weight_R,
    tiles_M4,
    dh_rows_E,
    dh_columns_EC,
    a_rows_E,
    a_columns_EC,
    dh_rows_PN,
    dh_scales_P,
    dh_copy,
    dh_copy_scales,
    dh_maxima,
    dh_saturated,
    a_copy,
    a_copy_scales,
    a_maxima,
    a_saturated,
    dots_BR,
    M,
    R,
    rounds,
    F: gl.constexpr,
    CHANNELS: gl.constexpr,
    A_CHANNELS: gl.constexpr,
    SATURATES: gl.constexpr,
    A_SATURATES: gl.constexpr,
):
    """`rounds` is 4, which the compiler must not know: it would unroll the loops and run out of registers. CHANNELS:
    those with scales of their own, or 1."""
    BY_CHANNEL: gl.constexpr = CHANNELS > 1
    A_BY_CHANNEL: gl.constexpr = A_CHANNELS > 1
    block = gl.program_id(0)
    m = gl.program_id(1)
    facts = tiles_M4 + 4 * m
    expert = gl.load(facts)
    row = gl.load(facts + 1)
    real = gl.load(facts + 2)
    if real > 0:  # in use
        wide_m = m.to(gl.int64)
        first = wide_m * 128
        tile = TilePlace(row, first, real, expert)
        factors = gl.allocate_shared_memory(gl.float32, [16, 1, ROWS], FACTOR_LINES)
        dot_parts = gl.allocate_shared_memory(gl.float32, [4, ROWS, 8], DOT_PARTS)
        P = M * 128
        keep_row_factors(factors, h_scales, weight_R, tile, block, P, F)
        # scales: of rows, which are their expert's, and of columns
        dh_scale = gl.load(dh_rows_E + expert)
        r = gl.arange(0, 128, layout=LINE)
        of_rows = gl.full([128], dh_scale, gl.float32, LINE)
        gl.store(dh_scales_P + first + r, of_rows, mask=(r >= 0) & (block == 0))
        dh_rows = scales_of_expert(dh_scale)
        a_rows = scales_of_expert(gl.load(a_rows_E + expert))
        column = block * 128
        of_a = load_column_scales(a_columns_EC, a_rows, expert, column, A_CHANNELS)
        of_gate = load_column_scales(dh_columns_EC, dh_rows, expert, column, CHANNELS)
        of_up = load_column_scales(dh_columns_EC, dh_rows, expert, F + column, CHANNELS)
        # where this program's columns lie
        da_at = da_RF + row.to(gl.int64) * F + column
        h_at = h_PN + first * (2 * F) + column
        gate_rows = dh_rows_PN + first * (2 * F) + column
        a_line = wide_m * F + column
        gate_line = wide_m * (2 * F) + column
        up_line = gate_line + F
        a_bytes = a_copy + a_line * 128
        gate_bytes = dh_copy + gate_line * 128
        up_bytes = dh_copy + up_line * 128
        # largest magnitudes and counts so far
        a_most = zero_columns()
        gate_most = zero_columns()
        up_most = zero_columns()
        a_beyond = no_counts()
        dh_beyond = no_counts()
        for i in range(rounds):
            d, g, u = load_round(da_at, h_at, i, real, F)
            act, dgate, dup, dot = round_gradients(d, g, u, load_row_factors(factors, i))
            keep_dots(dot_parts, i, dot)
            a_most = larger_columns(a_most, act)
            gate_most = larger_columns(gate_most, dgate)
            up_most = larger_columns(up_most, dup)
            # along rows
            gate_q = dgate * dh_rows.factor[None, :]
            up_q = dup * dh_rows.factor[None, :]
            row_at = gate_rows + i * (ROWS * 2 * F)
            store_row_copy(gate_q, row_at, F)
            store_row_copy(up_q, row_at + F, F)
            # along columns
            a_q = act * of_a.factor[None, :]
            if A_BY_CHANNEL:
                a_beyond += count_of_thread(a_q, A_SATURATES)
            if BY_CHANNEL:
                gate_q = dgate * of_gate.factor[None, :]
                up_q = dup * of_up.factor[None, :]
                dh_beyond += count_of_thread(gate_q, SATURATES)
                dh_beyond += count_of_thread(up_q, SATURATES)
            above = i * ROWS
            store_column_copy(a_q, a_bytes + above)
            store_column_copy(gate_q, gate_bytes + above)
            store_column_copy(up_q, up_bytes + above)
        # what the next scales are made from, and the scales for the products
        a_most = largest_of_lanes(a_most)
        gate_most = largest_of_lanes(gate_most)
        up_most = largest_of_lanes(up_most)
        store_column_facts(a_most, of_a.scale, a_maxima + a_line, a_copy_scales + a_line)
        store_column_facts(gate_most, of_gate.scale, dh_maxima + gate_line, dh_copy_scales + gate_line)
        store_column_facts(up_most, of_up.scale, dh_maxima + up_line, dh_copy_scales + up_line)
        # the gradient of the rows' weights
        store_dots(dot_parts, factors, dots_BR + block.to(gl.int64) * R, tile)
        # saturated values
        if A_BY_CHANNEL:
            add_count(a_saturated, a_beyond)
        if BY_CHANNEL:
            add_count(dh_saturated, dh_beyond)
        leaving = leaves_range(a_most, a_rows.factor, A_SATURATES)
        leaving += leaves_range(gate_most, dh_rows.factor, SATURATES)
        leaving += leaves_range(up_most, dh_rows.factor, SATURATES)
        if gl.sum(leaving, 0) > 0:
            A_COPIES: gl.constexpr = 1 if A_BY_CHANNEL else 2  # with the scale of an expert
            COPIES: gl.constexpr = 1 if BY_CHANNEL else 2
            a_count = no_counts()
            dh_count = no_counts()
            for i in range(rounds):
                d, g, u = load_round(da_at, h_at, i, real, F)
                act, dgate, dup, _ = round_gradients(d, g, u, load_row_factors(factors, i))
                a_count += A_COPIES * count_of_thread(act * a_rows.factor[None, :], A_SATURATES)
                dh_count += COPIES * count_of_thread(dgate * dh_rows.factor[None, :], SATURATES)
                dh_count += COPIES * count_of_thread(dup * dh_rows.factor[None, :], SATURATES)
            add_count(a_saturated, a_count)
            add_count(dh_saturated, dh_count)
