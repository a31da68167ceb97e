"""Row stash: rows whose number only the device knows, in pages of one pool.

    push_rows   x_RW -> pages of pool_PC, as many as the defined rows need
    pop_rows    pages of pool_PC -> x_RW, and with `returns` the pages go back to the ring

R rows of width W, of which those before `ends_e[-1]` are defined; P pages of C elements: 64 rows of a cell, which is a
piece of a row. `ring_P` has the numbers of all pages. Free ones lie from `head` on and before `tail`, both counted
without end and taken modulo P; pages are taken at the head and returned at the tail. Who never returns any, but moves
the head back, has a stack.

`state_4` has head, tail, the most pages in use so far, and whether rows found no room: then nothing is written, and
what is popped is zero. `taken_2` has the head before a push and the number of pages taken, `pages_M` their numbers,
block by block of 64 rows and within a block cell by cell, -1 behind the last. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.stash_pages import PAGE_ROWS
from moefold.kernels.experts.page_grid import TAIL, PageGrid
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


def mask_of_rows(x_RW: Tensor, count: Tensor) -> Tensor:
    """(R, 1): the rows before the count."""
    number_R = torch.arange(len(x_RW), device=x_RW.device)
    is_before_R = number_R < count
    return is_before_R[:, None]


@register_in_place_op
def push_rows(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
) -> None:
    """Copy the defined rows to free pages; `state_4`, `taken_2` and `pages_M` tell of it."""
    grid = PageGrid.of(x_RW, pool_PC)
    last_end = ends_e[-1].long()
    take_pages(state_4, taken_2, last_end, grid.cells, len(pool_PC))
    first, taken = taken_2
    number_M = torch.arange(grid.pages, device=x_RW.device)
    is_taken_M = number_M < taken
    place_M = (first + number_M) % len(ring_P)
    page_M = ring_P[place_M]
    pages_M.copy_(page_M.where(is_taken_M, -1))
    defined_RW = x_RW.where(mask_of_rows(x_RW, last_end), 0)
    tiles_MC = grid.tiles_of(defined_RW)
    write_at(pool_PC, page_M, tiles_MC, is_taken_M)


def take_pages(state_4: Tensor, taken_2: Tensor, rows: Tensor, cells: int, pages: int) -> None:
    """Move the head over the pages that so many rows need, or note that there are too few."""
    head, tail, most, overflowed = state_4.clone()
    blocks = (rows + PAGE_ROWS - 1) // PAGE_ROWS
    needed = blocks * cells
    fits = head + needed <= tail
    taken = needed * fits
    new_head = head + taken
    in_use = new_head - (tail - pages)
    taken_2.copy_(torch.stack((head, taken)))
    state_4.copy_(torch.stack((new_head, tail, most.maximum(in_use), overflowed.maximum((~fits).long()))))


def write_at(table: Tensor, place_M: Tensor, values: Tensor, is_written_M: Tensor) -> None:
    """table[place] = values where asked. What is not asked for repeats the first, or writes what is there."""
    if len(place_M) == 0:
        return
    first = place_M[:1]
    there = table.index_select(0, first)
    shape = (-1, *[1] * (table.ndim - 1))
    is_first_written = is_written_M[:1].view(shape)
    first_value = values[:1].where(is_first_written, there)
    written = values.where(is_written_M.view(shape), first_value)
    table.index_copy_(0, place_M.where(is_written_M, first), written)


@register_in_place_op
def pop_rows(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
    returns: bool = False,
) -> None:
    """Copy rows back that were pushed. 64 rows behind the last, or more, become zero: products over 64 rows at a time
    read these."""
    grid = PageGrid.of(x_RW, pool_PC)
    last_end = ends_e[-1].long()
    taken = taken_2[1]
    tiles_MC = pool_PC[pages_M.clamp(min=0)]
    found_RW = grid.rows_of(tiles_MC, x_RW)
    is_found_R1 = mask_of_rows(x_RW, last_end) & (taken > 0)
    found_RW = found_RW.where(is_found_R1, 0)
    blocks = (last_end + PAGE_ROWS - 1) // PAGE_ROWS
    written_R1 = mask_of_rows(x_RW, (blocks + 1) * PAGE_ROWS)
    x_RW.copy_(found_RW.where(written_R1, x_RW))
    if returns:
        number_M = torch.arange(len(pages_M), device=x_RW.device)
        place_M = (state_4[TAIL] + number_M) % len(ring_P)
        write_at(ring_P, place_M, pages_M, number_M < taken)
        state_4[TAIL] += taken


@push_rows.register_fast("triton")
def push_rows_triton(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
) -> None:
    from moefold.kernels.experts.row_stash_triton import launch_push_rows

    launch_push_rows(x_RW, ends_e, pool_PC, ring_P, state_4, taken_2, pages_M)


@pop_rows.register_fast("triton")
def pop_rows_triton(
    x_RW: Tensor,
    ends_e: Tensor,
    pool_PC: Tensor,
    ring_P: Tensor,
    state_4: Tensor,
    taken_2: Tensor,
    pages_M: Tensor,
    returns: bool = False,
) -> None:
    from moefold.kernels.experts.row_stash_triton import launch_pop_rows

    launch_pop_rows(x_RW, ends_e, pool_PC, ring_P, state_4, taken_2, pages_M, returns)


CASE_PAGES = 12
CASE_CELL = 16
STASH_CASES = {  # R, defined rows, W, head, tail
    "one row": (1, 1, 4, 0, 12),
    "half of the rows": (200, 100, 20, 0, 12),
    "no rows": (70, 0, 16, 3, 12),
    "around the end of the ring": (130, 129, 40, 8, 20),
    "all pages": (256, 256, 48, 4, 16),
    "too many rows": (256, 193, 48, 5, 16),
}


def stash_case(draw: CaseInputs, name: str) -> list[Tensor]:
    rows, defined, width, head, tail = STASH_CASES[name]
    x_RW = draw.normal(rows, width)
    pool_PC = draw.normal(CASE_PAGES, CASE_CELL * PAGE_ROWS, seed=1)
    device = draw.device
    ends_e = torch.tensor([defined // 2, defined], dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(rows)
    ring_P = torch.randperm(CASE_PAGES, generator=generator).to(device)
    state_4 = torch.tensor([head, tail, 0, 0], device=device)
    taken_2 = torch.zeros(2, dtype=torch.int64, device=device)
    pages = PageGrid.of(x_RW, pool_PC).pages
    pages_M = torch.zeros(pages, dtype=torch.int64, device=device)
    return [x_RW, ends_e, pool_PC, ring_P, state_4, taken_2, pages_M]


@push_rows.register_cases
def push_rows_cases(draw: CaseInputs) -> Cases:
    for name in STASH_CASES:
        inputs = stash_case(draw, name)
        yield KernelCase(name, tuple(inputs))


@pop_rows.register_cases
def pop_rows_cases(draw: CaseInputs) -> Cases:
    for name in STASH_CASES:
        inputs = stash_case(draw, name)
        push_rows(*inputs)
        inputs[0] = torch.ones_like(inputs[0])
        yield KernelCase(name, (*inputs, True))
