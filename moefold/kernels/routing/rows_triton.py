"""Gathers of rows from tokens, sums of rows per token, and the list of row tiles, in Triton. Imported only where Triton
is.

N source rows, R rows in expert order, P with each expert's padded, D width, K rows at most per source row, E experts, M
tiles of 128 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 128
GATHER_ROWS = 16  # rows of one program of a gather
TILES_PER_PROGRAM = 32


@triton.jit
def gather_rows_kernel(source_ND, index_R, out_RD, R, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[r] = source[index[r]], zeros where the index is -1."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    n = tl.load(index_R + r, mask=r < R, other=-1).to(tl.int64)
    held = (n >= 0)[:, None] & (c < D)[None, :]
    x = tl.load(source_ND + n[:, None] * D + c[None, :], mask=held, other=0.0)
    inside = (r < R)[:, None] & (c < D)[None, :]
    tl.store(out_RD + r.to(tl.int64)[:, None] * D + c[None, :], x, mask=inside)


@triton.jit
def gather_padded_kernel(
    source_ND, index_R, tiles_M4, out_PD, D, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Some rows of a tile. Zeros follow an expert's last row up to the end of its half tile."""
    tile = tiles_M4 + 4 * (tl.program_id(0) // (TILE // ROWS))
    row = tl.load(tile + 1)
    real = tl.load(tile + 2)
    pad = tl.load(tile + 3).to(tl.int64)
    r = tl.program_id(0) % (TILE // ROWS) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    n = tl.load(index_R + row + r, mask=r < real, other=-1).to(tl.int64)
    held = (n >= 0)[:, None] & (c < D)[None, :]
    x = tl.load(source_ND + n[:, None] * D + c[None, :], mask=held, other=0.0)
    filled = r // (TILE // 2) * (TILE // 2) < real
    inside = filled[:, None] & (c < D)[None, :]
    tl.store(out_PD + (pad + r)[:, None] * D + c[None, :], x, mask=inside)


@triton.jit
def sum_slots_kernel(y_RD, slots_NK, out_ND, D, K: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """out[n] = the sum of y over the slots of n, in their order."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], WIDE)
    for k in tl.static_range(K):
        r = tl.load(slots_NK + n * K + k).to(tl.int64)
        y = tl.load(y_RD + r * D + c, mask=(r >= 0) & (c < D), other=0.0)
        total += y.to(WIDE)
    tl.store(out_ND + n * D + c, total.to(out_ND.dtype.element_ty), mask=c < D)


@triton.jit
def row_tiles_kernel(
    ends_E, pads_E, tiles_M4, count, M, E, TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Each tile finds its expert by comparing with where the experts' tiles end: no search, no host."""
    # rows and tiles of each expert
    e = tl.arange(0, WIDTH)
    ends = tl.load(ends_E + e, mask=e < E, other=0)
    begins = tl.load(ends_E + e - 1, mask=(e > 0) & (e < E), other=0)
    rows = tl.where(e < E, ends - begins, 0)
    tiles = (rows + TILE - 1) // TILE
    last = tl.cumsum(tiles, 0)
    # experts that lie before tile m, and those that have begun by then
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = ((m[:, None] >= last[None, :]) & (e < E)[None, :]).to(tl.int32)
    begun = (m[:, None] >= (last - tiles)[None, :]).to(tl.int32)
    row = tl.sum(before * rows[None, :], 1) + (m - tl.sum(before * tiles[None, :], 1)) * TILE
    left = tl.sum(begun * rows[None, :], 1) - row
    halves = (rows + TILE // 2 - 1) // (TILE // 2) * (TILE // 2)  # rows padded to half tiles
    padded = row + tl.sum(before * (halves - rows)[None, :], 1)
    # expert, first row, real rows, first padded row
    at = tiles_M4 + 4 * m
    tl.store(at, tl.sum(before, 1), mask=m < M)
    tl.store(at + 1, row, mask=m < M)
    tl.store(at + 2, tl.minimum(left, TILE), mask=m < M)
    tl.store(at + 3, padded, mask=m < M)
    # totals, by the first program alone
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(tiles, 0))
        tl.store(pads_E + e, tl.cumsum(halves, 0) - halves, mask=e < E)


def gather_by_index(source_ND: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """out[r] = source[index[r]], zeros where the index is -1."""
    r, d = len(index_R), source_ND.shape[1]
    out_RD = source_ND.new_empty(r, d)
    if out_RD.numel():
        cols = min(256, triton.next_power_of_2(d))
        grid = (triton.cdiv(r, GATHER_ROWS), triton.cdiv(d, cols))
        source_ND = source_ND.contiguous()
        gather_rows_kernel[grid](source_ND, index_R, out_RD, r, d, GATHER_ROWS, cols, num_warps=8)
    return out_RD


def gather_padded(source_ND: torch.Tensor, index_R: torch.Tensor, tiles_M4: torch.Tensor, experts: int) -> torch.Tensor:
    """The same with each expert's rows padded by zeros to half tiles. Rows behind the last expert's are not written."""
    d = source_ND.shape[1]
    most_padding = TILE // 2 * experts
    out_PD = source_ND.new_empty(len(index_R) + most_padding, d)
    cols = min(256, triton.next_power_of_2(d))
    grid = (len(tiles_M4) * (TILE // GATHER_ROWS), triton.cdiv(d, cols))
    source_ND = source_ND.contiguous()
    gather_padded_kernel[grid](source_ND, index_R, tiles_M4, out_PD, d, TILE, GATHER_ROWS, cols, num_warps=8)
    return out_PD


def sum_over_slots(y_RD: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
    """out[n] = the sum of y over the slots of n that are not -1, in fp32 or better, in the order of the slots."""
    n, k = slots_NK.shape
    d = y_RD.shape[1]
    out_ND = y_RD.new_empty(n, d)
    if out_ND.numel():
        wide = tl.float64 if y_RD.dtype == torch.float64 else tl.float32
        cols = min(1024, triton.next_power_of_2(d))
        grid = (n, triton.cdiv(d, cols))
        sum_slots_kernel[grid](y_RD.contiguous(), slots_NK.contiguous(), out_ND, d, k, cols, wide)
    return out_ND


def plan_row_tiles(ends_E: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every tile its expert, first row, number of rows, and first row where experts are padded to half tiles; the
    number of tiles; each expert's first padded row. Sizes depend on shapes alone; `rows` may exceed the last end."""
    experts = len(ends_E)
    most = rows // TILE + experts
    tiles_M4 = torch.empty(most, 4, dtype=torch.int32, device=ends_E.device)
    count = torch.empty(1, dtype=torch.int32, device=ends_E.device)
    pads_E = torch.empty(experts, dtype=torch.int32, device=ends_E.device)
    width = max(triton.next_power_of_2(experts), 2)
    grid = (triton.cdiv(most, TILES_PER_PROGRAM),)
    row_tiles_kernel[grid](ends_E, pads_E, tiles_M4, count, most, experts, TILE, width, TILES_PER_PROGRAM)
    return tiles_M4, count, pads_E
