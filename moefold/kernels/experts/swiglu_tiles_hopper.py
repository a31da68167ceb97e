"""SwiGLU's gradient and its quantisation in one pass, in Gluon. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns of the gate and the same columns of up, 32 at a time. A chunk has all
rows of its columns, so copies along columns are complete at once. Copies along rows need the largest of 128 columns:
they are made in a second round, which computes the gradient again from what the caches still hold.

A thread has 4 rows of 4 columns, and eight neighbouring threads 32 rows: their 32 bytes of a column are contiguous in
the transposed copy. Few values in a thread let several programs share a processor, so that loads and
arithmetic overlap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal, scale_from_amax

COLUMNS = gl.constexpr(32)  # of a chunk


def row_steps(*steps: int) -> list[list[int]]:
    return [[step, 0] for step in steps]


def column_steps(*steps: int) -> list[list[int]]:
    return [[0, step] for step in steps]


ROWS_OF_THREAD = row_steps(1, 2)
COLUMNS_OF_THREAD = column_steps(1, 2)
LANES = row_steps(4, 8, 16) + column_steps(4, 8)
WARPS = column_steps(16) + row_steps(32, 64)


def chunk_layout(of_thread: list[list[int]]) -> gl.constexpr:
    chunk = [128, 32]
    layout = gl.DistributedLinearLayout(of_thread, LANES, WARPS, [], chunk)
    return gl.constexpr(layout)


LAYOUT = chunk_layout(COLUMNS_OF_THREAD + ROWS_OF_THREAD)
BY_COLUMN = chunk_layout(ROWS_OF_THREAD + COLUMNS_OF_THREAD)  # the same places
BY_ROW = gl.constexpr(gl.SliceLayout(1, LAYOUT))


class Fp8Rule(NamedTuple):
    """The rule of a scale: the largest FP8 number, and whether scales are powers of two."""

    LARGEST: Any
    POWER_OF_TWO: Any


class RowTile(NamedTuple):
    """A tile: its number, its first row in the order without padding, its first padded row, its real rows."""

    m: Any
    row: Any
    first: Any
    real: Any


@gluon.jit
def tile_rows():
    """0 to 127, one for each row of a tile."""
    return gl.arange(0, 128, layout=BY_ROW)


@gluon.jit
def full_rows(value):
    """The same number for each row of a tile."""
    return gl.full([128], value, gl.float32, BY_ROW)


@gluon.jit
def load_or_zero(at, inside):
    return gl.load(at, mask=inside, other=0.0)


@gluon.jit
def chunk_columns(PLACES: gl.constexpr):
    """0 to 31, one for each column of a chunk."""
    columns: gl.constexpr = gl.SliceLayout(0, PLACES)
    return gl.arange(0, COLUMNS, layout=columns)


@gluon.jit
def chunk_places(stride):
    """Row r, column c: r * stride + c."""
    r = tile_rows()
    c = chunk_columns(LAYOUT)
    row_start = r[:, None] * stride
    return row_start + c[None, :]


@gluon.jit
def load_chunk(da_RF, h_PN, tile, column, F):
    """da, gate and up, as they are stored."""
    there = tile_rows() < tile.real
    inside = there[:, None]
    # the gradient of the activation
    row = tile.row.to(gl.int64)
    da_line = row * F
    da_at = da_RF + da_line + column
    da_places = chunk_places(F)
    d = load_or_zero(da_at + da_places, inside)
    # the pre-activation
    width = 2 * F
    h_line = tile.first * width
    h_at = h_PN + h_line + column
    h_places = chunk_places(width)
    gate_at = h_at + h_places
    g = load_or_zero(gate_at, inside)
    u = load_or_zero(gate_at + F, inside)
    return d, g, u


@gluon.jit
def row_scales_at(scales, block, tile, P):
    """Where the scales of a tile's rows lie, of one block of 128 columns."""
    block = block.to(gl.int64)
    line = block * P
    first = scales + line + tile.first
    return first + tile_rows()


@gluon.jit
def load_kept_scale(h_scales, line, tile, P):
    """One scale for each row, of 128 values of h; 1 where h is not quantised."""
    r = tile_rows()
    scale = full_rows(1.0)
    if h_scales is not None:
        at = row_scales_at(h_scales, line, tile, P)
        scale = load_or_zero(at, r < tile.real)
    return scale


@gluon.jit
def find_scale(amax, rule):
    return scale_from_amax(amax, rule.LARGEST, rule.POWER_OF_TWO)


@gluon.jit
def larger_of_three(x0, x1, x2, y0, y1, y2):
    z0 = larger_magnitude(x0, y0)
    z1 = larger_magnitude(x1, y1)
    z2 = larger_magnitude(x2, y2)
    return z0, z1, z2


@gluon.jit
def column_maxima(x0, x1, x2):
    """Largest magnitudes of the columns of three chunks: warps wait for each other once instead of thrice."""
    magnitudes = (gl.abs(x0), gl.abs(x1), gl.abs(x2))
    return gl.reduce(magnitudes, 0, larger_of_three)


@gluon.jit
def store_columns(x, amax, copy, tile, column, N, rule):
    """The copy along columns of a chunk, transposed, and its scales, one for each column."""
    values_MNB, scales_MN = copy
    c = chunk_columns(LAYOUT)
    scale = find_scale(amax, rule)
    m = tile.m.to(gl.int64)
    line = m * N
    scales_at = scales_MN + line + column
    gl.store(scales_at + c, scale)
    factor = reciprocal(scale)
    place_columns(x, factor, values_MNB, tile, column, N)


@gluon.jit
def place_columns(x, factor, values_MNB, tile, column, N):
    """The FP8 values of a chunk, transposed."""
    q = x * factor[None, :]
    by_column = gl.convert_layout(q, BY_COLUMN)
    rounded = by_column.to(values_MNB.dtype.element_ty)  # a thread's rows, which are neighbours in a word of the copy
    # row r of column c lies at 128 c + r
    rows: gl.constexpr = gl.SliceLayout(1, BY_COLUMN)
    r = gl.arange(0, 128, layout=rows)
    c = column + chunk_columns(BY_COLUMN)
    column_start = c * 128
    column_start = column_start[None, :]
    place = column_start + r[:, None]
    values_at = values_MNB + tile.first * N
    gl.store(values_at + place, rounded)


@gluon.jit
def store_plain(x, values_PN, tile, column, N):
    line = tile.first * N
    first = values_PN + line + column
    at = first + chunk_places(N)
    rounded = x.to(values_PN.dtype.element_ty)
    gl.store(at, rounded)


@gluon.jit
def store_row_scale(amax, row_scales, line, tile, P, rule):
    """The scale of each row's 128 values."""
    scale = find_scale(amax, rule)
    at = row_scales_at(row_scales, line, tile, P)
    gl.store(at, scale)
    return scale


@gluon.jit
def parts_of_rows(x):
    """The columns of a chunk by thread: what a row has in one thread is reduced there, and once in the end, behind all
    chunks, between threads."""
    shape: gl.constexpr = [128, COLUMNS // 4, 4]
    return x.reshape(shape)


@gluon.jit
def add_parts(sums, x):
    parts = parts_of_rows(x)
    return sums + gl.sum(parts, 2)


@gluon.jit
def larger_parts(maxima, x):
    magnitude = gl.abs(x)
    parts = parts_of_rows(magnitude)
    found = gl.reduce(parts, 2, larger_magnitude)
    return larger_magnitude(maxima, found)


@gluon.jit
def zero_parts():
    zero = gl.full([128, COLUMNS], 0.0, gl.float32, LAYOUT)
    parts = parts_of_rows(zero)
    return gl.sum(parts, 2)


@gluon.jit
def sum_parts(sums):
    whole = gl.sum(sums, 1)
    return gl.convert_layout(whole, BY_ROW)


@gluon.jit
def largest_part(maxima):
    whole = gl.reduce(maxima, 1, larger_magnitude)
    return gl.convert_layout(whole, BY_ROW)


@gluon.jit
def silu_and_tanh(g, half_scale):
    """silu(gate) = gate / 2 * (1 + t) with t = tanh(gate / 2); `half_scale`: half of each row's scale."""
    gate = g.to(gl.float32)
    half = gate * half_scale[:, None]
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], gl.float32, True, 1)
    silu = gl.fma(half, t, half)
    return silu, t


@gluon.jit
def chunk_gradients(d, g, u, half_scale):
    """Without the factors of rows: the activation, its product with da, twice the gradient of the gate, and that of up.
    silu has the slope (1 + silu + t - silu * t) / 2, with t = tanh(gate / 2)."""
    silu, t = silu_and_tanh(g, half_scale)
    da = d.to(gl.float32)
    up = u.to(gl.float32)
    act = silu * up
    product = da * up
    dot = product * silu
    rest = gl.fma(-silu, t, silu + t)
    twice_dgate = gl.fma(product, rest, product)
    dup = da * silu
    return act, dot, twice_dgate, dup


@gluon.jit
def quantise_gradient_kernel(
    da_RF, h_PN, h_scales, weight_R, tiles_M4,
    dh_rows_PN, row_scales, dh_copy, dh_copy_scales, a_copy, a_copy_scales, dots_BR,
    M, F, R, chunks,
    LARGEST: gl.constexpr, A_LARGEST: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """`dh_copy`, `a_copy`: along columns, with scales; or as they are, where there are no scales. `chunks` is 4, which
    the compiler must not know: it would unroll the loops and run out of registers."""
    dh_rule: gl.constexpr = Fp8Rule(LARGEST, POWER_OF_TWO)
    a_rule: gl.constexpr = Fp8Rule(A_LARGEST, POWER_OF_TWO)
    block = gl.program_id(0)
    m = gl.program_id(1)
    F = F // 128 * 128  # tells the compiler that it is a multiple of 128
    facts = tiles_M4 + 4 * m
    row = gl.load(facts + 1)
    real = gl.load(facts + 2)
    if real > 0:  # in use
        wide_m = m.to(gl.int64)
        first = wide_m * 128
        tile = RowTile(m, row, first, real)
        P = M * 128
        up_line = block + F // 128
        r = tile_rows()
        # factors of rows: the kept scales, and the router's weight
        gate_scale = load_kept_scale(h_scales, block, tile, P)
        half_scale = gate_scale * 0.5
        up_scale = load_kept_scale(h_scales, up_line, tile, P)
        inside = r < real
        w = load_or_zero(weight_R + row + r, inside)
        up_weight = up_scale * w
        gate_weight = up_weight * 0.5
        # sums and maxima of rows, in parts
        dots = zero_parts()
        gate_max = zero_parts()
        up_max = zero_parts()
        for_dh = (dh_copy, dh_copy_scales)
        for_a = (a_copy, a_copy_scales)
        # first round: what the weight gradients read, and the largest of each row
        for i in range(chunks):
            column = block * 128 + i * COLUMNS
            up_column = F + column
            d, g, u = load_chunk(da_RF, h_PN, tile, column, F)
            act, dot, dgate, dup = chunk_gradients(d, g, u, half_scale)
            dots = add_parts(dots, dot)
            act *= up_weight[:, None]
            dgate *= gate_weight[:, None]
            dup *= w[:, None]
            gate_max = larger_parts(gate_max, dgate)
            up_max = larger_parts(up_max, dup)
            if dh_copy_scales is None:
                store_plain(act, a_copy, tile, column, F)
                store_plain(dgate, dh_copy, tile, column, 2 * F)
                store_plain(dup, dh_copy, tile, up_column, 2 * F)
            else:
                most_act, most_dgate, most_dup = column_maxima(act, dgate, dup)
                store_columns(act, most_act, for_a, tile, column, F, a_rule)
                store_columns(dgate, most_dgate, for_dh, tile, column, 2 * F, dh_rule)
                store_columns(dup, most_dup, for_dh, tile, up_column, 2 * F, dh_rule)
        # the gradient of the rows' weights
        wide_block = block.to(gl.int64)
        line = wide_block * R
        dots_at = dots_BR + line + row + r
        dweight = sum_parts(dots) * up_scale
        gl.store(dots_at, dweight, mask=inside)
        # second round: copies along rows, whose factors hold those of the rows
        dgate_scale = store_row_scale(largest_part(gate_max), row_scales, block, tile, P, dh_rule)
        dup_scale = store_row_scale(largest_part(up_max), row_scales, up_line, tile, P, dh_rule)
        gate_factor = gate_weight * reciprocal(dgate_scale)
        up_factor = w * reciprocal(dup_scale)
        for i in range(chunks):
            column = block * 128 + i * COLUMNS
            d, g, u = load_chunk(da_RF, h_PN, tile, column, F)
            _, _, dgate, dup = chunk_gradients(d, g, u, half_scale)
            dgate *= gate_factor[:, None]
            store_plain(dgate, dh_rows_PN, tile, column, 2 * F)
            dup *= up_factor[:, None]
            up_column = F + column
            store_plain(dup, dh_rows_PN, tile, up_column, 2 * F)
