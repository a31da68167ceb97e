"""Gathers of rows from tokens, tokens spread over their rows, sums of rows per token, and the list of row tiles, in
Triton. Imported only where Triton is.

N source rows, R rows in expert order, P with each expert's padded, D width, K rows at most per source row, E experts, M
tiles of 128 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import (
    load_or_zero,
    numbers_from,
    program_block,
    store_inside,
    tile_mask,
    tile_pointers,
    wide_program_id,
)

TILE = 128
GATHER_ROWS = 16  # rows of one program of a gather
PADDED_COLUMNS = 1024  # of a program that gathers padded rows
PADDED_PROGRAMS = 1056  # that gather padded rows: eight for each processor of a large GPU
SPREAD = 4096  # entries of sources that a program spreads
SCANNED_ROWS = 256  # rows that a program fills where they have no source
TILES_PER_PROGRAM = 32


@triton.jit
def load_index(at, inside):
    """Source rows in 64 bits, -1 outside."""
    index = tl.load(at, mask=inside, other=-1)
    return index.to(tl.int64)


@triton.jit
def load_source_rows(source_ND, n, c, D):
    """Columns c of rows n, zeros for a row -1."""
    at = tile_pointers(source_ND, n, c, D)
    held = tile_mask(n >= 0, c < D)
    return load_or_zero(at, held)


@triton.jit
def gather_rows_kernel(source_ND, index_R, out_RD, R, D, ROWS: constexpr, COLS: constexpr):
    """out[r] = source[index[r]], zeros where the index is -1."""
    r = program_block(0, ROWS)
    c = program_block(1, COLS)
    n = load_index(index_R + r, r < R)
    x = load_source_rows(source_ND, n, c, D)
    inside = tile_mask(r < R, c < D)
    r = r.to(tl.int64)
    at = tile_pointers(out_RD, r, c, D)
    store_inside(at, x, inside)


@triton.jit
def gather_padded_kernel(
    source_ND, index_R, tiles_M4, count, out_PD, D, TILE: constexpr, ROWS: constexpr, COLS: constexpr
):  # fmt: skip
    """Some rows of a tile, then of another one: there may be room for many more tiles than there are. Zeros follow an
    expert's last row up to the end of its half tile."""
    parts = TILE // ROWS  # of a tile
    c = program_block(1, COLS)
    for number in range(tl.program_id(0), tl.load(count) * parts, tl.num_programs(0)):
        # the tile: its first row, its real rows, its first padded row
        tile = tiles_M4 + 4 * (number // parts)
        row = tl.load(tile + 1)
        real = tl.load(tile + 2)
        padded_row = tl.load(tile + 3)
        pad = padded_row.to(tl.int64)
        # this part of it
        r = numbers_from(number % parts * ROWS, ROWS)
        at = index_R + row + r
        n = load_index(at, r < real)
        x = load_source_rows(source_ND, n, c, D)
        # rows of half tiles that have begun
        HALF: constexpr = TILE // 2
        half = r // HALF
        filled = half * HALF < real
        inside = tile_mask(filled, c < D)
        padded = pad + r
        at = tile_pointers(out_PD, padded, c, D)
        store_inside(at, x, inside)


@triton.jit
def spread_sources(source_ND, slots_NK, out_RD, first, N, D, K: constexpr, ROWS: constexpr, COLS: constexpr):
    """Some sources, read once and written to each of their rows."""
    n = numbers_from(first, ROWS)
    c = program_block(1, COLS)
    is_source = n < N
    # loads first: none is moved ahead of a store
    slots = ()
    has_row = n < 0
    for k in tl.static_range(K):
        slot = tl.load(slots_NK + n * K + k, mask=is_source, other=-1)
        has_row = has_row | (slot >= 0)
        slots += (slot.to(tl.int64),)
    x = load_or_zero(tile_pointers(source_ND, n.to(tl.int64), c, D), tile_mask(has_row, c < D))
    for k in tl.static_range(K):
        at = tile_pointers(out_RD, slots[k], c, D)
        store_inside(at, x, tile_mask(slots[k] >= 0, c < D))


@triton.jit
def fill_without_source(index_R, out_RD, first, end, D, SCANNED: constexpr, ROWS: constexpr, COLS: constexpr):
    """Zeros in those of some rows before the end that have no source."""
    r = numbers_from(first, SCANNED)
    n = tl.load(index_R + r, mask=r < end, other=0)
    if tl.min(n) < 0:
        c = program_block(1, COLS)
        zeros = tl.zeros([ROWS, COLS], out_RD.dtype.element_ty)
        for begin in range(first, tl.minimum(first + SCANNED, end), ROWS):
            row = numbers_from(begin, ROWS)
            is_empty = tl.load(index_R + row, mask=row < end, other=0) < 0
            at = tile_pointers(out_RD, row.to(tl.int64), c, D)
            store_inside(at, zeros, tile_mask(is_empty, c < D))


@triton.jit
def spread_rows_kernel(
    source_ND, index_R, slots_NK, last_end, out_RD, N, D, programs,
    K: constexpr, ROWS: constexpr, COLS: constexpr, SCANNED: constexpr,
):  # fmt: skip
    """out[r] = source[index[r]] for the rows before the last end, zeros where the index is -1. The first programs
    spread sources, the others look for rows without one."""
    number = tl.program_id(0)
    if number < programs:
        spread_sources(source_ND, slots_NK, out_RD, number * ROWS, N, D, K, ROWS, COLS)
    else:
        end = tl.load(last_end)
        first = (number - programs) * SCANNED
        fill_without_source(index_R, out_RD, first, end, D, SCANNED, ROWS, COLS)


@triton.jit
def zero_behind_kernel(x_RD, last_end, R, D, COLS: constexpr):
    """Zeros in one of the rows behind the last expert's."""
    behind = tl.load(last_end)
    behind = behind.to(tl.int64)
    row = behind + tl.program_id(0)
    c = program_block(1, COLS)
    inside = (c < D) & (row < R)
    at = x_RD + row * D + c
    store_inside(at, 0.0, inside)


@triton.jit
def sum_slots_kernel(y_RD, slots_NK, out_ND, D, K: constexpr, COLS: constexpr, WIDE: constexpr):
    """out[n] = the sum of y over the slots of n, in their order."""
    n = wide_program_id(0)
    c = program_block(1, COLS)
    real_c = c < D
    total = tl.zeros([COLS], WIDE)
    for k in tl.static_range(K):
        at = slots_NK + n * K + k
        slot = tl.load(at)
        r = slot.to(tl.int64)
        held = (r >= 0) & real_c
        at = y_RD + r * D + c
        y = load_or_zero(at, held)
        total += y.to(WIDE)
    rounded = total.to(out_ND.dtype.element_ty)
    at = out_ND + n * D + c
    store_inside(at, rounded, real_c)


@triton.jit
def sum_of_selected(selected, values):
    """For each line of ones and zeros the sum of the values at its ones."""
    summands = selected * values[None, :]
    return tl.sum(summands, 1)


@triton.jit
def row_tiles_kernel(
    ends_E, tiles_M4, count, pads_E, first_tile_E, M, E, part,
    TILE: constexpr, PAD: constexpr, WIDTH: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Each tile finds its expert by comparing with where the experts' tiles end: no search, no host. Tiles behind the
    last expert's continue it, with no rows. The second axis of the grid: tables of the tiles of `part` experts each."""
    # rows and tiles of each expert
    e = tl.arange(0, WIDTH)
    real_e = e < E
    ends = load_or_zero(ends_E + e, real_e)
    before_e = ends_E + e - 1
    has_before = (e > 0) & real_e
    begins = load_or_zero(before_e, has_before)
    rows = ends - begins
    rows = tl.where(real_e, rows, 0)
    tiles = (rows + TILE - 1) // TILE
    number_of_part = tl.program_id(1)
    here = e // part == number_of_part
    tiles = tl.where(here, tiles, 0)
    # where its tiles begin and end
    last = tl.cumsum(tiles, 0)
    opening = last - tiles
    # experts that lie before tile m, and those that have begun by then
    m = program_block(0, BLOCK)
    m_column = m[:, None]
    is_before = m_column >= last[None, :]
    not_last = e < E - 1
    is_before = is_before & not_last[None, :]
    before = is_before.to(tl.int32)
    has_begun = m_column >= opening[None, :]
    begun = has_begun.to(tl.int32)
    # the tile's number within its expert, its first row, and the expert's rows from there on
    number = m - sum_of_selected(before, tiles)
    expert_row = sum_of_selected(before, rows)
    row = expert_row + number * TILE
    expert_end = sum_of_selected(begun, rows)
    left = expert_end - row
    # the same with each expert's rows padded to a multiple of PAD
    pads_of_rows = (rows + PAD - 1) // PAD
    padded_rows = pads_of_rows * PAD
    padding = padded_rows - rows
    padded = row + sum_of_selected(before, padding)
    # expert, first row, real rows, first padded row
    table = tiles_M4 + number_of_part * M * 4
    at = table + 4 * m
    real_m = m < M
    expert = tl.sum(before, 1)
    at_most = tl.minimum(left, TILE)
    real = tl.maximum(at_most, 0)
    store_inside(at, expert, real_m)
    store_inside(at + 1, row, real_m)
    store_inside(at + 2, real, real_m)
    store_inside(at + 3, padded, real_m)
    # totals, by the first program alone
    if tl.program_id(0) == 0:
        all_tiles = tl.sum(tiles, 0)
        tl.store(count + number_of_part, all_tiles)
        pad_ends = tl.cumsum(padded_rows, 0)
        pads = pad_ends - padded_rows
        store_inside(pads_E + e, pads, real_e)
        store_inside(first_tile_E + e, opening, real_e)


def columns_of_program(width: int, most: int) -> int:
    power = triton.next_power_of_2(width)
    return min(most, power)


def gather_by_index(source_ND: Tensor, index_R: Tensor) -> Tensor:
    """out[r] = source[index[r]], zeros where the index is -1."""
    r = len(index_R)
    d = source_ND.shape[1]
    out_RD = source_ND.new_empty(r, d)
    if out_RD.numel():
        source_ND = source_ND.contiguous()
        row_blocks = triton.cdiv(r, GATHER_ROWS)
        cols = columns_of_program(d, 256)
        grid = (row_blocks, triton.cdiv(d, cols))
        launch = gather_rows_kernel[grid]
        launch(source_ND, index_R, out_RD, r, d, GATHER_ROWS, cols, num_warps=8)
    return out_RD


def gather_padded(source_ND: Tensor, index_R: Tensor, tiles_M4: Tensor, count: Tensor, experts: int) -> Tensor:
    """The same with each expert's rows padded by zeros to half tiles. Rows behind the last expert's are not written.
    `count`: how many of the tiles there are."""
    d = source_ND.shape[1]
    most_padding = TILE // 2 * experts
    most_rows = len(index_R) + most_padding
    out_PD = source_ND.new_empty(most_rows, d)
    source_ND = source_ND.contiguous()
    most_parts = len(tiles_M4) * (TILE // GATHER_ROWS)
    cols = columns_of_program(d, PADDED_COLUMNS)
    column_blocks = triton.cdiv(d, cols)
    programs = min(most_parts, triton.cdiv(PADDED_PROGRAMS, column_blocks))
    launch = gather_padded_kernel[(programs, column_blocks)]
    launch(source_ND, index_R, tiles_M4, count, out_PD, d, TILE, GATHER_ROWS, cols, num_warps=8)
    return out_PD


def spread_over_slots(
    source_ND: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    out_RD: Tensor | None = None,
) -> Tensor:
    """out[r] = source[index[r]], zeros where the index is -1. Rows behind the last end are not written."""
    r = len(index_R)
    n, k = slots_NK.shape
    d = source_ND.shape[1]
    if out_RD is None:
        out_RD = source_ND.new_empty(r, d)
    if out_RD.numel():
        cols = columns_of_program(d, 1024)
        rows = max(1, SPREAD // cols)
        programs = triton.cdiv(n, rows)
        grid = (programs + triton.cdiv(r, SCANNED_ROWS), triton.cdiv(d, cols))
        inputs = (source_ND.contiguous(), index_R, slots_NK.contiguous(), ends_E[-1:])
        launch = spread_rows_kernel[grid]
        launch(*inputs, out_RD, n, d, programs, k, rows, cols, SCANNED_ROWS)
    return out_RD


def zero_rows_behind(x_RD: Tensor, ends_E: Tensor) -> None:
    """Zeros in the rows behind the last expert's, as far as a product over 64 rows at a time may read them."""
    rows, d = x_RD.shape
    cols = columns_of_program(d, 1024)
    most_behind = TILE // 2 - 1
    grid = (most_behind, triton.cdiv(d, cols))
    last_end = ends_E[-1:]
    launch = zero_behind_kernel[grid]
    launch(x_RD, last_end, rows, d, cols)


def sum_over_slots(y_RD: Tensor, slots_NK: Tensor, out_ND: Tensor | None = None) -> Tensor:
    """out[n] = the sum of y over the slots of n that are not -1, in fp32 or better, in the order of the slots."""
    n, k = slots_NK.shape
    d = y_RD.shape[1]
    if out_ND is None:
        out_ND = y_RD.new_empty(n, d)
    if out_ND.numel():
        y_RD = y_RD.contiguous()
        slots_NK = slots_NK.contiguous()
        is_double = y_RD.dtype == torch.float64
        wide = tl.float64 if is_double else tl.float32
        cols = columns_of_program(d, 1024)
        grid = (n, triton.cdiv(d, cols))
        launch = sum_slots_kernel[grid]
        launch(y_RD, slots_NK, out_ND, d, k, cols, wide)
    return out_ND


class PlannedTiles(NamedTuple):
    """For every tile its expert, first row, number of rows, and first row where each expert's rows are padded; the
    number of tiles; each expert's first padded row and first tile."""

    tiles_M4: Tensor
    count: Tensor
    pads_E: Tensor
    first_tile_E: Tensor


def plan_padded_tiles(ends_E: Tensor, rows: int, pad: int) -> PlannedTiles:
    """The tiles where each expert's rows are padded to a multiple of `pad`. Sizes depend on shapes alone; `rows` may
    exceed the last end."""
    experts = len(ends_E)
    plan = plan_by_part(ends_E, rows, pad, experts)
    return plan._replace(tiles_M4=plan.tiles_M4[0])


def plan_by_part(ends_E: Tensor, rows: int, pad: int, part: int) -> PlannedTiles:
    """The same with a table of tiles, and their number, for every `part` experts. With several parts `pads_E` and
    `first_tile_E` are undefined: each part writes its own."""
    experts = len(ends_E)
    parts = triton.cdiv(experts, part)
    most = rows // TILE + part
    pads_E = torch.empty_like(ends_E, dtype=torch.int32)
    first_tile_E = torch.empty_like(pads_E)
    tiles_CM4 = pads_E.new_empty(parts, most, 4)
    count_C = pads_E.new_empty(parts)
    plan = PlannedTiles(tiles_CM4, count_C, pads_E, first_tile_E)
    power = triton.next_power_of_2(experts)
    width = max(power, 2)
    programs = triton.cdiv(most, TILES_PER_PROGRAM)
    launch = row_tiles_kernel[(programs, parts)]
    launch(ends_E, *plan, most, experts, part, TILE, pad, width, TILES_PER_PROGRAM)
    return plan


def plan_parts(ends_E: Tensor, rows: int, part: int) -> tuple[Tensor, Tensor]:
    """The tiles of every `part` experts and their numbers, where experts are padded to half tiles."""
    half_tile = TILE // 2
    plan = plan_by_part(ends_E, rows, half_tile, part)
    return plan.tiles_M4, plan.count


def plan_row_tiles(ends_E: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles, their number and each expert's first padded row, where experts are padded to half tiles."""
    half_tile = TILE // 2
    plan = plan_padded_tiles(ends_E, rows, half_tile)
    return plan.tiles_M4, plan.count, plan.pads_E
