"""SwiGLU's gradient and its quantisation with scales of experts, in Gluon, with the layout of swiglu_tiles_hopper.py.
Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns of the gate and the same columns of up, 32 at a time, and once:
scales are known. Values are counted one by one only where the largest of a column leaves the range, in a second round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moefold.kernels.experts.swiglu_tiles_hopper import (
    COLUMNS,
    LAYOUT,
    RowTile,
    add_parts,
    chunk_columns,
    chunk_gradients,
    column_maxima,
    full_rows,
    load_chunk,
    load_kept_scale,
    load_or_zero,
    place_columns,
    store_plain,
    sum_parts,
    tile_rows,
    zero_parts,
)
from moefold.kernels.quantise.delayed_tiles_hopper import count_beyond, leaves_range
from moefold.kernels.quantise.fp8_hopper import reciprocal

OF_COLUMNS = gl.constexpr(gl.SliceLayout(0, LAYOUT))


class ColumnCopy(NamedTuple):
    """What is written of a tensor along columns: scales of experts (E, C), values (M, N, 128), their scales and largest
    magnitudes (M, N); N and C."""

    table_EC: Any
    bytes_MNB: Any
    scales_MN: Any
    maxima_MN: Any
    N: Any
    C: Any


@gluon.jit
def expert_scales(copy, expert, column):
    """The scales of a chunk's columns."""
    c = column + chunk_columns(LAYOUT)
    channel = gl.minimum(c, copy.C - 1)
    line = copy.table_EC + expert.to(gl.int64) * copy.C
    return gl.load(line + channel)


@gluon.jit
def store_copy(x, most, copy, row_factor, tile, expert, column, SATURATES: gl.constexpr):
    """The copy of a chunk along columns, its scales and largest magnitudes. Returns which columns leave the range
    there or along rows. `row_factor`: zero where there is no copy along rows."""
    scale = expert_scales(copy, expert, column)
    line = tile.m.to(gl.int64) * copy.N
    place = line + column + chunk_columns(LAYOUT)
    gl.store(copy.scales_MN + place, scale)
    gl.store(copy.maxima_MN + place, most)
    factor = reciprocal(scale)
    place_columns(x, factor, copy.bytes_MNB, tile, column, copy.N)
    larger_factor = gl.maximum(factor, row_factor)
    return leaves_range(most, larger_factor, SATURATES)


@gluon.jit
def weighted_gradients(da_RF, h_PN, tile, column, F, half_scale, up_weight, w):
    """The activation and the gradients of gate and up, of a chunk, and da times the unweighted activation."""
    d, g, u = load_chunk(da_RF, h_PN, tile, column, F)
    act, dot, dgate, dup = chunk_gradients(d, g, u, half_scale)
    act *= up_weight[:, None]
    dgate *= up_weight[:, None]
    dup *= w[:, None]
    return act, dot, dgate, dup


@gluon.jit
def count_in_copy(x, copy, expert, column, SATURATES: gl.constexpr):
    scale = expert_scales(copy, expert, column)
    return count_beyond(x, scale, SATURATES)


@gluon.jit
def quantise_delayed_gradient_kernel(
    da_RF, h_PN, h_scales, weight_R, tiles_M4, dh_rows_E, dh_columns_EC, a_columns_EC,
    dh_rows_PN, dh_scales_P, dh_copy, dh_copy_scales, dh_maxima, dh_saturated,
    a_copy, a_copy_scales, a_maxima, a_saturated, dots_BR,
    M, F, R, dh_channels, a_channels, chunks, SATURATES: gl.constexpr, A_SATURATES: gl.constexpr,
):  # fmt: skip
    """`chunks` is 4, which the compiler must not know: it would unroll the loops and run out of registers."""
    block = gl.program_id(0)
    m = gl.program_id(1)
    F = F // 128 * 128  # tells the compiler that it is a multiple of 128
    facts = tiles_M4 + 4 * m
    expert = gl.load(facts)
    row = gl.load(facts + 1)
    real = gl.load(facts + 2)
    if real > 0:  # in use
        wide_m = m.to(gl.int64)
        tile = RowTile(m, row, wide_m * 128, real)
        for_dh = ColumnCopy(dh_columns_EC, dh_copy, dh_copy_scales, dh_maxima, 2 * F, dh_channels)
        for_a = ColumnCopy(a_columns_EC, a_copy, a_copy_scales, a_maxima, F, a_channels)
        P = M * 128
        r = tile_rows()
        inside = r < real
        # factors of rows: the kept scales, the router's weight, the expert's scale
        gate_scale = load_kept_scale(h_scales, block, tile, P)
        half_scale = gate_scale * 0.5
        up_scale = load_kept_scale(h_scales, block + F // 128, tile, P)
        w = load_or_zero(weight_R + row + r, inside)
        up_weight = up_scale * w
        of_expert = gl.load(dh_rows_E + expert)
        dh_scale = full_rows(of_expert)
        gl.store(dh_scales_P + tile.first + r, dh_scale, mask=(r >= 0) & (block == 0))
        dh_factor = reciprocal(dh_scale)
        row_scale = gl.full([COLUMNS], of_expert, gl.float32, OF_COLUMNS)  # at each column
        row_factor = reciprocal(row_scale)
        dots = zero_parts()
        leaving = gl.full([COLUMNS], 0, gl.int32, OF_COLUMNS)
        for i in range(chunks):
            column = block * 128 + i * COLUMNS
            up_column = F + column
            act, dot, dgate, dup = weighted_gradients(da_RF, h_PN, tile, column, F, half_scale, up_weight, w)
            dots = add_parts(dots, dot)
            # along columns
            most_act, most_dgate, most_dup = column_maxima(act, dgate, dup)
            leaving += store_copy(act, most_act, for_a, 0.0, tile, expert, column, A_SATURATES)
            leaving += store_copy(dgate, most_dgate, for_dh, row_factor, tile, expert, column, SATURATES)
            leaving += store_copy(dup, most_dup, for_dh, row_factor, tile, expert, up_column, SATURATES)
            # along rows
            store_plain(dgate * dh_factor[:, None], dh_rows_PN, tile, column, 2 * F)
            store_plain(dup * dh_factor[:, None], dh_rows_PN, tile, up_column, 2 * F)
        # the gradient of the rows' weights
        line = block.to(gl.int64) * R
        dweight = sum_parts(dots) * up_scale
        gl.store(dots_BR + line + row + r, dweight, mask=inside)
        # saturated values
        if gl.sum(leaving, 0) > 0:
            of_a = gl.full([COLUMNS], 0, gl.int32, OF_COLUMNS)
            of_dh = gl.full([COLUMNS], 0, gl.int32, OF_COLUMNS)
            for i in range(chunks):
                column = block * 128 + i * COLUMNS
                act, dot, dgate, dup = weighted_gradients(da_RF, h_PN, tile, column, F, half_scale, up_weight, w)
                of_a += count_in_copy(act, for_a, expert, column, A_SATURATES)
                of_dh += count_in_copy(dgate, for_dh, expert, column, SATURATES)
                of_dh += count_in_copy(dup, for_dh, expert, F + column, SATURATES)
                of_dh += count_beyond(dgate, row_scale, SATURATES)
                of_dh += count_beyond(dup, row_scale, SATURATES)
            a_total = gl.sum(of_a, 0)
            dh_total = gl.sum(of_dh, 0)
            gl.atomic_add(a_saturated, a_total.to(gl.int64))  # whole numbers: the same in any order
            gl.atomic_add(dh_saturated, dh_total.to(gl.int64))
