"""Parts of both grouped GEMMs for Hopper (bf16 and FP8): the grid of tiles, the main loop of a product in the tensor
cores' accumulator, and the hand-over of a tile's halves to the epilogue. Imported only where Triton is.

A tile has 128 rows, in two halves of 64, one for each consumer warpgroup.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moefold.kernels.hopper import (
    banded_tile,
    free_stage_before,
    make_barriers,
    wait_until_filled,
    wgmma_layout,
)


class TileGrid(NamedTuple):
    """The tiles of a grouped GEMM: the routing on the device, the number of tiles, and the order of their rows and
    columns. `starts_E` is where an expert's operands begin."""

    tiles_M4: Any
    ends_E: Any
    starts_E: Any
    total: Any
    m_tiles: Any
    n_tiles: Any
    steps: Any
    band: Any


class Tile(NamedTuple):
    """One tile: its expert, first row, real rows, where its operands begin, steps of the contraction, coordinates."""

    expert: Any
    row: Any
    real: Any
    start: Any
    steps: Any
    m: Any
    n: Any


class HalfProduct(NamedTuple):
    """How a consumer multiplies: columns of the tile, depth of the contraction in one instruction, stages in flight,
    and how the operands' buffers lie."""

    BN: Any
    DEPTH: Any
    STAGES: Any
    A_BY_COLUMN: Any
    B_BY_ROW: Any


class Hand(NamedTuple):
    """The hand-over: memory of a tile of results, and for each half barriers: made (by the consumer) and gone (to
    memory, by the epilogue)."""

    tile: Any
    made: Any
    gone: Any


class HalfTile(NamedTuple):
    """64 rows of a tile as the epilogue gets them: which half, the barrier and its phase for which it has to wait,
    the plane of the result, first row, first padded row, real rows from there on, and the tile's column n."""

    half: Any
    made: Any
    phase: Any
    plane: Any
    row: Any
    pad: Any
    real: Any
    n: Any


@gluon.jit
def grid_of_tiles(tiles_M4, count, ends_E, starts_E, experts, m_rows, n_tiles, steps, band, BY_EXPERT: gl.constexpr):
    """Every expert has tiles of `m_rows` rows (BY_EXPERT), or the routing says how many tiles of rows there are."""
    if BY_EXPERT:
        m_tiles = gl.cdiv(m_rows, 128)
        total = experts * m_tiles * n_tiles
    else:
        m_tiles = gl.load(count)
        total = m_tiles * n_tiles
    return TileGrid(tiles_M4, ends_E, starts_E, total, m_tiles, n_tiles, steps, band)


@gluon.jit
def locate_tile(t, grid, BY_EXPERT: gl.constexpr, BK: gl.constexpr):
    """Tile t, or the last where t lies beyond it. BY_EXPERT: the contraction is over an expert's rows."""
    last = gl.maximum(grid.total - 1, 0)
    t = gl.minimum(t, last)
    if BY_EXPERT:
        tiles_of_expert = grid.m_tiles * grid.n_tiles
        expert = t // tiles_of_expert
        inside = t % tiles_of_expert
        m, n = banded_tile(inside, grid.m_tiles, grid.n_tiles, grid.band)
        end_at = grid.ends_E + expert
        row = gl.load(end_at - 1, mask=expert > 0, other=0)
        real = gl.load(end_at) - row
        steps = gl.cdiv(real, BK)
        start = gl.load(grid.starts_E + expert)
    else:
        m, n = banded_tile(t, grid.m_tiles, grid.n_tiles, grid.band)
        facts = grid.tiles_M4 + 4 * m
        expert = gl.load(facts)
        row = gl.load(facts + 1)
        real = gl.load(facts + 2)
        start = gl.load(facts + 3)
        steps = grid.steps
    return Tile(expert, row, real, start, steps, m, n)


@gluon.jit
def arrive_at(bars, i):
    bar = bars.index(i)
    mbarrier.arrive(bar)


@gluon.jit
def left_buffer(ring, s, HALF: gl.constexpr):
    """The left operand of a stage, as one consumer reads it."""
    return ring.a_bufs.index(2 * s + HALF)


@gluon.jit
def multiply_half(ring, i, steps, HALF: gl.constexpr, product):
    """64 x BN sums, of steps i, i + 1, ... A stage is freed one step later, when its product is done."""
    STAGES: gl.constexpr = product.STAGES
    layout: gl.constexpr = wgmma_layout(product.BN, product.DEPTH)
    acc = gl.zeros([64, product.BN], gl.float32, layout)
    for k in range(steps):
        step = i + k
        s = wait_until_filled(ring.full, step, STAGES)
        # the operands of this step
        a = left_buffer(ring, s, HALF)
        if product.A_BY_COLUMN:
            a = a.permute((1, 0))
        b = ring.b_bufs.index(s)
        if product.B_BY_ROW:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # the product of the step before is done
        acc = warpgroup_mma_wait(1, deps=(acc,))
        free_stage_before(ring.empty, step, k > 0, STAGES)
    # the last product
    acc = warpgroup_mma_wait(0, deps=(acc,))
    free_stage_before(ring.empty, i + steps, steps > 0, STAGES)
    return acc


@gluon.jit
def make_hand(tile):
    made = make_barriers(2, 1)
    gone = make_barriers(2, 1)
    return Hand(tile, made, gone)


@gluon.jit
def wait_until_gone(hand, turn, HALF: gl.constexpr):
    """The consumer's wait for room: until the epilogue has taken the half of the tile before."""
    phase = turn & 1
    mbarrier.wait(hand.gone.index(HALF), phase ^ 1)


@gluon.jit
def skip_half(ring, hand, i, steps, turn, HALF: gl.constexpr, STAGES: gl.constexpr):
    """No real rows in this half: only free the stages, and hand over nothing."""
    for k in range(steps):
        s = wait_until_filled(ring.full, i + k, STAGES)
        arrive_at(ring.empty, s)
    wait_until_gone(hand, turn, HALF)
    arrive_at(hand.made, HALF)
