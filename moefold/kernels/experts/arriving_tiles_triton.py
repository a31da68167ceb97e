"""The order of tiles whose rows arrive or leave, and the tiles of programs, in Triton. Imported only where Triton is.

Tiles are those of 128 rows of an expert (kernels/routing/rows_triton.py). The pieces of each rank are some portions,
and tiles are sorted by portions in the order of ranks from a given one on, and within a portion as they were: by the
last portion that a tile's rows come from, where it waits for them, or by the first, where sums of that portion wait for
the tile. Each program takes the next tile when it has finished one, so that programs that wait hold nobody up; a
tile's numbers do not depend on who takes it.

R rows of experts, M tiles, P pieces, s ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.routing.rows_triton import plan_row_tiles
from moefold.kernels.tile_triton import numbers_from, program_block, store_inside

BAND = 8  # rows of tiles whose columns are taken together: they share weights in the cache
TILES_PER_PROGRAM = 32
COMPARED = 128  # tiles that are compared at a time


@triton.jit
def place_in_turn(
    tiles_M4, count, index_R, ends_P, m, first, blocks,
    RANKS: constexpr, BY_LAST: constexpr,
):  # fmt: skip
    """How many ranks, from `first` on, come before the last or the first one that a tile's rows come from. Tiles behind
    the last come behind all."""
    inside = m < tl.load(count)
    row = tl.load(tiles_M4 + 4 * m + 1, mask=inside, other=0)
    real = tl.load(tiles_M4 + 4 * m + 2, mask=inside, other=0)
    inside = inside & (real > 0)
    begin = tl.load(index_R + row, mask=inside, other=-1)
    end = tl.load(index_R + row + real - 1, mask=inside, other=-1)
    low = tl.zeros_like(m)
    high = tl.zeros_like(m)
    for rank in tl.static_range(RANKS - 1):
        end_of_rank = tl.load(ends_P + (rank + 1) * blocks - 1)
        low += (begin >= end_of_rank).to(tl.int32)
        high += (end >= end_of_rank).to(tl.int32)
    high = tl.where(end < 0, RANKS - 1, high)  # rows of padding say nothing
    low = tl.where(begin < 0, RANKS - 1, low)
    if BY_LAST:
        final = (first + RANKS - 1) % RANKS
        has_final = (low <= final) & (high >= final)
        turn = tl.where(has_final, RANKS - 1, (high - first + RANKS) % RANKS)
    else:
        has_first = (low <= first) & (high >= first)
        turn = tl.where(has_first, 0, (low - first + RANKS) % RANKS)
    return tl.where(inside, turn, RANKS)


@triton.jit(do_not_specialize=["first"])
def order_tiles_kernel(
    tiles_M4,
    count,
    index_R,
    ends_P,
    ordered_M4,
    M,
    first,
    blocks,
    RANKS: constexpr,
    BY_LAST: constexpr,
    BLOCK: constexpr,
    COMPARED: constexpr,
):
    """Some tiles find their places by comparison with all others: no sort, no atomics."""
    m = program_block(0, BLOCK)
    turn = place_in_turn(tiles_M4, count, index_R, ends_P, m, first, blocks, RANKS, BY_LAST)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, M, COMPARED):
        other = numbers_from(begin, COMPARED)
        other_turn = place_in_turn(tiles_M4, count, index_R, ends_P, other, first, blocks, RANKS, BY_LAST)
        is_same = other_turn[None, :] == turn[:, None]
        comes_before = is_same & (other[None, :] < m[:, None])
        comes_before = comes_before | (other_turn[None, :] < turn[:, None])
        place += tl.sum(comes_before.to(tl.int32), 1)
    inside = m < M
    for part in tl.static_range(4):
        value = tl.load(tiles_M4 + 4 * m + part, mask=inside, other=0)
        store_inside(ordered_M4 + 4 * place + part, value, inside)


class OrderedTiles(NamedTuple):
    """Expert, first row, rows and first padded row of each tile, and their number."""

    tiles_M4: Tensor
    count: Tensor


def order_tiles(
    index_R: Tensor,
    ends_E: Tensor,
    ends_P: Tensor,
    first: int,
    ranks: int,
    by_last: bool,
) -> OrderedTiles:
    """The tiles in the order of ranks from `first` on: by the last that they wait for, or by the first that waits for
    them."""
    tiles_M4, count, _ = plan_row_tiles(ends_E, len(index_R))
    ordered_M4 = tiles_M4.new_empty(tiles_M4.shape)
    most = len(tiles_M4)
    blocks = len(ends_P) // ranks
    launch = order_tiles_kernel[(triton.cdiv(most, TILES_PER_PROGRAM),)]
    inputs = (tiles_M4, count, index_R, ends_P, ordered_M4)
    sizes = (ranks, by_last, TILES_PER_PROGRAM, COMPARED)
    launch(*inputs, most, first, blocks, *sizes)
    return OrderedTiles(ordered_M4, count)


@triton.jit
def take_number(following):
    """The number of the next tile that no program has taken."""
    return tl.atomic_add(following, 1, sem="relaxed", scope="gpu")


@triton.jit
def locate_tile(number, count, columns, BAND: constexpr):
    """The row of tiles and the column of a tile: bands of rows, in each of them column by column."""
    of_band = BAND * columns
    band = number // of_band
    first = band * BAND
    height = tl.minimum(count - first, BAND)
    inside = number - band * of_band
    return first + inside % height, inside // height


@triton.jit
def load_tile(tiles_M4, m):
    """The expert of a row of tiles, its first row, and its rows."""
    tile = tiles_M4 + 4 * m
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
