"""Narrow grouped products of adapters, in Triton: rows to a rank, and the gradients of both matrices. Imported only
where Triton is.

    low[r]  = factor * x[r] M[expert of r]      M (E, L, W) read transposed, or (E, W, L) as it is
    out[e]  = sum over rows r of e of narrow[r]^T wide[r]      (E, L, W), or transposed (E, W, L)

R rows sorted by expert, W width, L rank, E experts. All bytes are those of the wide rows, which are read once: row r is
`source[index[r]]` where there is an index. Sums are in fp32 and have one order: two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.routing.rows_triton import TILE, load_index
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_or_zero,
    numbers_from,
    program_block,
    store_inside,
    tile_mask,
    tile_pointers,
)

SHORTEST = 16  # columns of a tile that tensor cores multiply
DEPTH = 64  # of a step of a sum
COLUMNS = 128  # of a program that sums over rows


@triton.jit
def rows_or_sources(index_R, row, inside):
    """Where rows lie, in 64 bits: themselves, or by the index; -1: nowhere."""
    if index_R is None:
        return tl.where(inside, row, -1).to(tl.int64)
    else:
        return load_index(index_R + row, inside)


@triton.jit
def narrow_rows_kernel(
    source,
    index_R,
    matrices,
    out_RL,
    tiles_M4,
    count,
    W,
    L,
    factor,
    BY_ROW: constexpr,
    TILE: constexpr,
    DEPTH: constexpr,
    WIDTH: constexpr,
):
    """A tile of rows of one expert. BY_ROW: its matrix has the rank as rows (L, W)."""
    number = tl.program_id(0)
    if number >= tl.load(count):
        return
    tile = tiles_M4 + 4 * number
    expert = tl.load(tile).to(tl.int64)
    first = tl.load(tile + 1)
    real = tl.load(tile + 2)
    r = numbers_from(0, TILE)
    n = rows_or_sources(index_R, first + r, r < real)
    rank = numbers_from(0, WIDTH)
    matrix = matrices + expert * W * L
    total = fp32_zeros(TILE, WIDTH)
    for begin in range(0, W, DEPTH):
        c = numbers_from(begin, DEPTH)
        x = load_or_zero(tile_pointers(source, n, c, W), tile_mask(n >= 0, c < W))
        if BY_ROW:
            m = tl.trans(load_or_zero(tile_pointers(matrix, rank, c, W), tile_mask(rank < L, c < W)))
        else:
            m = load_or_zero(tile_pointers(matrix, c, rank, L), tile_mask(c < W, rank < L))
        total = tl.dot(x, m, total, input_precision="ieee")
    low = (total * factor).to(out_RL.dtype.element_ty)
    row = (first + r).to(tl.int64)
    store_inside(tile_pointers(out_RL, row, rank, L), low, tile_mask(r < real, rank < L))


@triton.jit
def sum_outer_products_kernel(
    source,
    index_R,
    narrow_RL,
    out,
    ends_E,
    starts_E,
    W,
    L,
    ADD: constexpr,
    BY_ROW: constexpr,
    DEPTH: constexpr,
    WIDTH: constexpr,
    COLUMNS: constexpr,
):
    """Some columns of one expert's gradient. BY_ROW: the gradient has the rank as rows. `starts_E`: where rows of the
    source begin for each expert, if not where those of `narrow_RL` do."""
    expert = tl.program_id(0)
    end_at = ends_E + expert
    begin = tl.load(end_at - 1, mask=expert > 0, other=0)
    rows = tl.load(end_at) - begin
    wide_begin = begin
    if starts_E is not None:
        wide_begin = tl.load(starts_E + expert)
    c = program_block(1, COLUMNS)
    rank = numbers_from(0, WIDTH)
    total = fp32_zeros(COLUMNS, WIDTH)
    for above in range(0, rows, DEPTH):
        r = numbers_from(above, DEPTH)
        inside = r < rows
        n = rows_or_sources(index_R, wide_begin + r, inside)
        x = load_or_zero(tile_pointers(source, n, c, W), tile_mask(n >= 0, c < W))
        row = (begin + r).to(tl.int64)
        low = load_or_zero(tile_pointers(narrow_RL, row, rank, L), tile_mask(inside, rank < L))
        total = tl.dot(tl.trans(x), low, total, input_precision="ieee")
    matrix = out + expert.to(tl.int64) * W * L
    if BY_ROW:
        total = tl.trans(total)
        at = tile_pointers(matrix, rank, c, W)
        there = tile_mask(rank < L, c < W)
    else:
        at = tile_pointers(matrix, c, rank, L)
        there = tile_mask(c < W, rank < L)
    if ADD:
        total += load_or_zero(at, there).to(tl.float32)
    store_inside(at, total.to(out.dtype.element_ty), there)


def padded_rank(rank: int) -> int:
    return max(SHORTEST, triton.next_power_of_2(rank))


def narrow_rows(
    source: Tensor,
    matrices: Tensor,
    tiles: tuple[Tensor, Tensor],
    factor: float,
    by_row: bool,
    rows: int,
    index_R: Tensor | None = None,
) -> Tensor:
    """low_RL. `tiles`: those of the rows, and their number. `by_row`: matrices are (E, L, W), else (E, W, L). Rows
    behind the last expert's are not written."""
    tiles_M4, count = tiles
    width = source.shape[1]
    rank = matrices.shape[1] if by_row else matrices.shape[2]
    out_RL = source.new_empty(rows, rank)
    launch = narrow_rows_kernel[(len(tiles_M4),)]
    sizes = (width, rank, factor)
    tensors = (source.contiguous(), index_R, matrices.contiguous(), out_RL, tiles_M4, count)
    launch(*tensors, *sizes, by_row, TILE, DEPTH, padded_rank(rank), num_warps=4, num_stages=4)
    return out_RL


def sum_outer_products(
    source: Tensor,
    narrow_RL: Tensor,
    out: Tensor,
    ends_E: Tensor,
    by_row: bool,
    add: bool,
    index_R: Tensor | None = None,
    starts_E: Tensor | None = None,
) -> None:
    """Writes or adds to `out`: (E, L, W) `by_row`, else (E, W, L); zeros for an expert without rows."""
    width = source.shape[1]
    rank = narrow_RL.shape[1]
    experts = len(ends_E)
    launch = sum_outer_products_kernel[(experts, triton.cdiv(width, COLUMNS))]
    tensors = (source.contiguous(), index_R, narrow_RL, out, ends_E, starts_E)
    constants = (add, by_row, DEPTH, padded_rank(rank), COLUMNS)
    launch(*tensors, width, rank, *constants, num_warps=4, num_stages=4)
