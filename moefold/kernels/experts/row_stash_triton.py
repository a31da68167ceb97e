"""Rows to and from the pages of a stash, in Triton. Imported only where Triton is.

R rows of width W, P pages of C elements, 64 rows of a cell; one program for each page that the rows may need.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.config.stash_pages import PAGE_ROWS
from moefold.kernels.experts.page_grid import TAIL, PageGrid
from moefold.kernels.tile_triton import (
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
    wide_program_id,
)


@triton.jit
def take_pages_kernel(last_end, state_4, taken_2, cells, P, ROWS: constexpr):
    """Move the head over the pages that the rows need, or note that there are too few. One program."""
    rows = tl.load(last_end).to(tl.int64)
    head = tl.load(state_4)
    tail = tl.load(state_4 + 1)
    blocks = (rows + ROWS - 1) // ROWS
    needed = blocks * cells
    fits = head + needed <= tail
    taken = tl.where(fits, needed, 0)
    new_head = head + taken
    in_use = new_head - (tail - P)
    most = tl.load(state_4 + 2)
    overflowed = tl.load(state_4 + 3)
    tl.store(taken_2, head)
    tl.store(taken_2 + 1, taken)
    tl.store(state_4, new_head)
    tl.store(state_4 + 2, tl.maximum(most, in_use))
    tl.store(state_4 + 3, tl.where(fits, overflowed, 1))


@triton.jit
def page_tile(pool_PC, page, ROWS: constexpr, CELL: constexpr):
    """Where the elements of a page lie."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, CELL)
    begin = pool_PC + page * ROWS * CELL
    return tile_pointers(begin, r, c, CELL)


@triton.jit
def push_rows_kernel(
    x_RW, last_end, pool_PC, ring_P, taken_2, pages_M, W, P, cells, ROWS: constexpr, CELL: constexpr
):  # fmt: skip
    """One block of rows, one cell of each, to its page; zeros behind the last row and column."""
    number = wide_program_id(0)
    first = tl.load(taken_2)
    taken = tl.load(taken_2 + 1)
    if number < taken:
        page = tl.load(ring_P + (first + number) % P)
        tl.store(pages_M + number, page)
        rows = tl.load(last_end)
        r = numbers_from(number // cells * ROWS, ROWS)
        c = numbers_from(number % cells * CELL, CELL)
        inside = tile_mask(r < rows, c < W)
        at = tile_pointers(x_RW, r, c, W)
        x = load_or_zero(at, inside)
        tl.store(page_tile(pool_PC, page, ROWS, CELL), x)
    else:
        tl.store(pages_M + number, -1)


@triton.jit
def pop_rows_kernel(
    x_RW, last_end, pool_PC, ring_P, state_4, taken_2, pages_M, R, W, P, cells,
    RETURNS: constexpr, ROWS: constexpr, CELL: constexpr,
):  # fmt: skip
    """One block of rows, one cell of each, from its page. The tail is moved by who launches this: all programs read
    it."""
    number = wide_program_id(0)
    taken = tl.load(taken_2 + 1)
    rows = tl.load(last_end).to(tl.int64)
    block = number // cells
    # rows that are defined, and zeros up to the end of the block behind them
    if (block - 1) * ROWS < rows:
        page = tl.load(pages_M + number)
        is_held = page >= 0
        r = numbers_from(block * ROWS, ROWS)
        c = numbers_from(number % cells * CELL, CELL)
        held = tile_mask((r < rows) & is_held, c < W)
        tile = page_tile(pool_PC, tl.maximum(page, 0), ROWS, CELL)
        x = load_or_zero(tile, held)
        at = tile_pointers(x_RW, r, c, W)
        store_inside(at, x, tile_mask(r < R, c < W))
        returned = tl.where(RETURNS, taken, 0)
        if number < returned:
            tail = tl.load(state_4 + 1)
            tl.store(ring_P + (tail + number) % P, page)


def launch_push_rows(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
) -> None:
    grid = PageGrid.of(x_RW, pool_PC)
    pages = len(pool_PC)
    last_end = ends_e[-1:]
    take_pages_kernel[(1,)](last_end, state_4, taken_2, grid.cells, pages, PAGE_ROWS, num_warps=1)
    if grid.pages:
        launch = push_rows_kernel[(grid.pages,)]
        width = x_RW.shape[1]
        sizes = (width, pages, grid.cells, PAGE_ROWS, grid.cell)
        launch(x_RW, last_end, pool_PC, ring_P, taken_2, pages_M, *sizes)


def launch_pop_rows(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
    returns: bool,
) -> None:
    grid = PageGrid.of(x_RW, pool_PC)
    if grid.pages:
        launch = pop_rows_kernel[(grid.pages,)]
        last_end = ends_e[-1:]
        sizes = (*x_RW.shape, len(pool_PC), grid.cells, returns, PAGE_ROWS, grid.cell)
        launch(x_RW, last_end, pool_PC, ring_P, state_4, taken_2, pages_M, *sizes)
    if returns:
        state_4[TAIL] += taken_2[1]
