"""Products of matrices that are known to be symmetric, for Hopper, in Gluon: only tiles on and below the diagonal are
computed, and only those are stored, unless the other half is asked for.

A tile has 128 rows and 256 columns, or 128 columns where the rest would lie above the diagonal: with larger tiles the
L2 cache is read less often. One warp is the producer (TMA loads), two warpgroups are consumers (wgmma), each for 64
rows, and two warps store a tile while the consumers multiply the next one.

    row 0   N                   N: a narrow tile, on the diagonal
    row 1   W W                 W W: a wide tile
    row 2   W W N
    row 3   W W W W

    form        operands                            128 rows r of an operand at depth k
    "rows"      A (R, K)                            [r, k]
    "columns"   A (K, R)                            [k, r], a transposed operand of wgmma
    "lower"     A (R, R), symmetric, lower tiles    [r, k] up to the tile on the diagonal, [k, r] behind it

A product of a matrix with itself reads the rows of a tile on the diagonal once. Sums are fp32. Results are symmetric to
the bit: 64 x 64 blocks on the diagonal are mirrored. No atomics: two runs agree to the bit, and a matrix does not
depend on those beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moefold.kernels.experts.gemm_tiles_hopper import arrive_at, make_hand, wait_until_gone
from moefold.kernels.hopper import (
    make_barriers,
    shared_blocks,
    swizzled_buffers,
    wait_until_filled,
    wait_until_free,
    wgmma_layout,
)

TILE = gl.constexpr(128)  # rows of a tile, and columns of a piece
HALF_ROWS = gl.constexpr(64)  # rows of a consumer
DEPTH = gl.constexpr(64)  # of a step of the contraction: 128 bytes
STEPS_OF_TILE = gl.constexpr(2)  # of the contraction, in the width of a tile
PENDING_STORES = gl.constexpr(1)  # while the other mirror is written
MIRROR_LAYOUT = gl.constexpr(  # a thread has 16 bytes of a row; lanes read neighbouring columns of the transposed
    gl.BlockedLayout(
        size_per_thread=[1, 8],
        threads_per_warp=[32, 1],
        warps_per_cta=[2, 1],
        order=[1, 0],
    )
)


class ProductKind(NamedTuple):
    """What the kernel is compiled for: the form of the operands, whether both are one matrix, whether a matrix is
    added, whether each product has a scale, whether tiles above the diagonal are stored, stages in flight."""

    FORM: Any
    SQUARES: Any
    ADDS: Any
    SCALES: Any
    MIRRORS: Any
    STAGES: Any


class SymmetricOperand(NamedTuple):
    """Descriptors of a batch of matrices: blocks of 128 rows and 64 columns, and of 64 rows and 128 columns."""

    by_row: Any
    by_column: Any


class SymmetricGrid(NamedTuple):
    """The tiles: of all matrices, of one matrix, steps of the contraction."""

    total: Any
    per_matrix: Any
    steps: Any


class SymmetricTile(NamedTuple):
    """A tile: its matrix, the number of its rows in units of 128 and of its columns in units of 256. `a_piece`: the
    piece of a stage that has its rows, which in a product of a matrix with itself may be those of its columns too."""

    matrix: Any
    row: Any
    group: Any
    is_wide: Any
    a_piece: Any


class SymmetricRing(NamedTuple):
    """The stages: operands in shared memory and barriers of stages filled and free. A stage has three pieces, of the
    left operand and two of the right one: 128 rows of depth 64, or transposed. `halves`: 64 rows, or transposed."""

    by_row: Any
    by_column: Any
    halves: Any
    full: Any
    empty: Any


class ProductNumbers(NamedTuple):
    """What a product is multiplied by, for all matrices and for each, what the added matrix is, and what is added on
    the diagonal."""

    alpha: Any
    scales_N: Any
    beta: Any
    diagonal: Any


@gluon.jit
def locate_tile(t, grid, kind):
    """Tile t. Tiles of a matrix begin with another one in each matrix, so that every program gets narrow ones."""
    matrix = t // grid.per_matrix
    number = (t + matrix) % grid.per_matrix
    # two rows of tiles have p + 1 groups of columns each, behind p (p + 1) tiles of the rows above
    root = gl.sqrt(4.0 * number + 1.0)
    p = ((root - 1.0) * 0.5 + 1e-3).to(gl.int32)
    inside = number - p * (p + 1)
    groups = p + 1
    row = 2 * p + inside // groups
    group = inside % groups
    is_wide = 2 * group < row
    a_piece = 0
    if kind.SQUARES:
        a_piece = gl.where(row // 2 == group, 1 + row % 2, 0)
    return SymmetricTile(matrix, row, group, is_wide, a_piece)


# ---- the producer


@gluon.jit
def fetch_operands(a, b, add_desc, ring, hand, added, grid, kind):
    """Keep STAGES steps of operands in flight, across tile boundaries."""
    piece_bytes: gl.constexpr = TILE * DEPTH * 2
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    i = 0
    for t in range(program, grid.total, programs):
        tile = locate_tile(t, grid, kind)
        left = 2 * tile.group
        reads_a = tile.a_piece == 0
        count = 1 + tile.is_wide.to(gl.int32) + reads_a.to(gl.int32)
        for k in range(grid.steps):
            s = wait_until_free(ring.empty, i, kind.STAGES)
            bar = ring.full.index(s)
            mbarrier.expect(bar, piece_bytes, pred=count == 1)
            mbarrier.expect(bar, 2 * piece_bytes, pred=count == 2)
            mbarrier.expect(bar, 3 * piece_bytes, pred=count == 3)
            fetch_piece(a, ring, bar, 3 * s, tile.matrix, tile.row, k, reads_a, kind)
            fetch_piece(b, ring, bar, 3 * s + 1, tile.matrix, left, k, left >= 0, kind)
            fetch_piece(b, ring, bar, 3 * s + 2, tile.matrix, left + 1, k, tile.is_wide, kind)
            i += 1
        if kind.ADDS:
            turn = t // programs
            fetch_added(add_desc, hand, added, tile, turn)


@gluon.jit
def fetch_piece(operand, ring, bar, place, matrix, number, k, wanted, kind):
    """128 rows of an operand at step k of the contraction, if wanted."""
    row = number * TILE
    depth = k * DEPTH
    if kind.FORM != "columns":
        by_row = ring.by_row.index(place).reshape([1, TILE, DEPTH])
        is_there = wanted
        if kind.FORM == "lower":
            is_there = wanted & (k < (number + 1) * STEPS_OF_TILE)
        tma.async_copy_global_to_shared(operand.by_row, [matrix, row, depth], bar, by_row, pred=is_there)
    if kind.FORM != "rows":
        by_column = ring.by_column.index(place).reshape([1, DEPTH, TILE])
        is_mirrored = wanted
        if kind.FORM == "lower":
            is_mirrored = wanted & (k >= (number + 1) * STEPS_OF_TILE)
        tma.async_copy_global_to_shared(operand.by_column, [matrix, depth, row], bar, by_column, pred=is_mirrored)


@gluon.jit
def fetch_added(add_desc, hand, added, tile, turn):
    """The tile of the added matrix, to where the result goes, once the result before has gone."""
    block_bytes: gl.constexpr = HALF_ROWS * HALF_ROWS * 2
    blocks = shared_blocks(hand.tile, HALF_ROWS, HALF_ROWS)
    count = gl.where(tile.is_wide, 4, 2)
    for half in gl.static_range(2):
        wait_until_gone(hand, turn, half)
        bar = added.index(half)
        if tile.is_wide:
            mbarrier.expect(bar, 4 * block_bytes)
        else:
            mbarrier.expect(bar, 2 * block_bytes)
        row = tile.row * TILE + half * HALF_ROWS
        for c in range(count):
            column = tile.group * 2 * TILE + c * HALF_ROWS
            block = blocks.index(4 * half + c).reshape([1, HALF_ROWS, HALF_ROWS])
            tma.async_copy_global_to_shared(add_desc, [tile.matrix, row, column], bar, block)


# ---- the consumers


@gluon.jit
def left_operand(ring, s, piece, HALF: gl.constexpr, MIRRORED: gl.constexpr):
    """64 rows of the left operand of stage s."""
    half = ring.halves.index(6 * s + 2 * piece + HALF)
    if MIRRORED:
        half = half.permute((1, 0))
    return half


@gluon.jit
def right_operand(ring, s, PIECE: gl.constexpr, MIRRORED: gl.constexpr):
    """128 columns of the right operand of stage s."""
    if MIRRORED:
        columns = ring.by_column.index(3 * s + 1 + PIECE)
    else:
        columns = ring.by_row.index(3 * s + 1 + PIECE).permute((1, 0))
    return columns


@gluon.jit
def multiply_range(
    left, right, ring, i, first, last, piece,
    A_MIRRORED: gl.constexpr, LEFT_MIRRORED: gl.constexpr, RIGHT_MIRRORED: gl.constexpr, HALF: gl.constexpr, kind,
):  # fmt: skip
    """Steps `first` to `last` of the contraction of a wide tile. A stage is freed at once: with the other consumer the
    tensor cores have enough to do, and more stages are in flight. One piece of 256 columns was slower than two."""
    for k in range(first, last):
        s = wait_until_filled(ring.full, i + k, kind.STAGES)
        a = left_operand(ring, s, piece, HALF, A_MIRRORED)
        left = warpgroup_mma(a, right_operand(ring, s, 0, LEFT_MIRRORED), left, is_async=True)
        right = warpgroup_mma(a, right_operand(ring, s, 1, RIGHT_MIRRORED), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        arrive_at(ring.empty, s)
    return left, right


@gluon.jit
def multiply_narrow_range(sums, ring, i, first, last, piece, MIRRORED: gl.constexpr, HALF: gl.constexpr, kind):
    for k in range(first, last):
        s = wait_until_filled(ring.full, i + k, kind.STAGES)
        a = left_operand(ring, s, piece, HALF, MIRRORED)
        sums = warpgroup_mma(a, right_operand(ring, s, 0, MIRRORED), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        arrive_at(ring.empty, s)
    return sums


@gluon.jit
def multiply_wide(ring, i, steps, tile, HALF: gl.constexpr, kind):
    """The sums of a wide tile, as two pieces. Of the form "lower" the operand with the first rows is mirrored first."""
    left = gl.zeros([HALF_ROWS, TILE], gl.float32, wgmma_layout(TILE, 16))
    right = gl.zeros([HALF_ROWS, TILE], gl.float32, wgmma_layout(TILE, 16))
    a = tile.a_piece
    if kind.FORM == "rows":
        left, right = multiply_range(left, right, ring, i, 0, steps, a, False, False, False, HALF, kind)
    elif kind.FORM == "columns":
        left, right = multiply_range(left, right, ring, i, 0, steps, a, True, True, True, HALF, kind)
    else:
        after_left = STEPS_OF_TILE * (2 * tile.group + 1)
        after_right = gl.minimum(after_left + STEPS_OF_TILE, steps)
        after_row = gl.minimum(STEPS_OF_TILE * (tile.row + 1), steps)
        left, right = multiply_range(left, right, ring, i, 0, after_left, a, False, False, False, HALF, kind)
        left, right = multiply_range(left, right, ring, i, after_left, after_right, a, False, True, False, HALF, kind)
        left, right = multiply_range(left, right, ring, i, after_right, after_row, a, False, True, True, HALF, kind)
        left, right = multiply_range(left, right, ring, i, after_row, steps, a, True, True, True, HALF, kind)
    return left, right


@gluon.jit
def multiply_narrow(ring, i, steps, tile, HALF: gl.constexpr, kind):
    """The sums of a narrow tile, which lies on the diagonal."""
    sums = gl.zeros([HALF_ROWS, TILE], gl.float32, wgmma_layout(TILE, 16))
    a = tile.a_piece
    after = steps
    if kind.FORM == "columns":
        after = 0
    elif kind.FORM == "lower":
        after = gl.minimum(STEPS_OF_TILE * (tile.row + 1), steps)
    if kind.FORM != "columns":
        sums = multiply_narrow_range(sums, ring, i, 0, after, a, False, HALF, kind)
    if kind.FORM != "rows":
        sums = multiply_narrow_range(sums, ring, i, after, steps, a, True, HALF, kind)
    return sums


@gluon.jit
def hand_over(hand, sums, place, row, column, alpha, numbers, kind):
    """A piece of the result to shared memory, where the added matrix lies, if there is one."""
    layout: gl.constexpr = sums.type.layout
    piece = hand.tile.index(place)
    sums *= alpha
    if kind.ADDS:
        sums += numbers.beta * piece.load(layout).to(gl.float32)
        r = row + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
        c = column + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        sums += gl.where(r[:, None] == c[None, :], numbers.diagonal, 0.0)
    piece.store(sums.to(hand.tile.dtype))


@gluon.jit
def multiply_tiles(ring, hand, added, grid, numbers, HALF: gl.constexpr, kind):
    """A consumer: 64 of a tile's 128 rows. (In a tile on the diagonal 64 columns would do for the first 64 rows, but
    products of fewer columns made the whole slower.)"""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    i = 0
    for t in range(program, grid.total, programs):
        tile = locate_tile(t, grid, kind)
        turn = t // programs
        row = tile.row * TILE + HALF * HALF_ROWS
        column = tile.group * 2 * TILE
        alpha = numbers.alpha
        if kind.SCALES:
            alpha *= gl.load(numbers.scales_N + tile.matrix)
        if tile.is_wide:
            left, right = multiply_wide(ring, i, grid.steps, tile, HALF, kind)
            await_place(hand, added, turn, HALF, kind)
            hand_over(hand, left, 2 * HALF, row, column, alpha, numbers, kind)
            hand_over(hand, right, 2 * HALF + 1, row, column + TILE, alpha, numbers, kind)
        else:
            sums = multiply_narrow(ring, i, grid.steps, tile, HALF, kind)
            await_place(hand, added, turn, HALF, kind)
            hand_over(hand, sums, 2 * HALF, row, column, alpha, numbers, kind)
        fence_async_shared()
        arrive_at(hand.made, HALF)
        i += grid.steps


@gluon.jit
def await_place(hand, added, turn, HALF: gl.constexpr, kind):
    """Wait for the added matrix in the place of the result, or for the place alone."""
    if kind.ADDS:
        mbarrier.wait(added.index(HALF), turn & 1)
    else:
        wait_until_gone(hand, turn, HALF)


# ---- the epilogue


@gluon.jit
def below_diagonal_twice(block, transposed):
    """A block on the diagonal, whose values above it are those below it."""
    r = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, MIRROR_LAYOUT))
    c = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(0, MIRROR_LAYOUT))
    return gl.where(r[:, None] >= c[None, :], block, transposed)


@gluon.jit
def store_tiles(out_desc, hand, mirrors, grid, kind):
    """Store the blocks of a tile on and below the diagonal, and transposed those of a tile on the diagonal, or all."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    blocks = shared_blocks(hand.tile, HALF_ROWS, HALF_ROWS)
    mirrored = 0
    for t in range(program, grid.total, programs):
        tile = locate_tile(t, grid, kind)
        phase = t // programs & 1
        count = gl.where(tile.is_wide, 4, 2)
        for half in range(2):
            mbarrier.wait(hand.made.index(half), phase)
            row = tile.row * TILE + half * HALF_ROWS
            first_mirrored = 0 if kind.MIRRORS else tile.row * TILE
            for c in range(count):
                column = tile.group * 2 * TILE + c * HALF_ROWS
                block = blocks.index(4 * half + c)
                if column < row:
                    here = block.reshape([1, HALF_ROWS, HALF_ROWS])
                    tma.async_copy_shared_to_global(out_desc, [tile.matrix, row, column], here)
                if (column <= row) & (column >= first_mirrored):
                    above = block.permute((1, 0)).load(MIRROR_LAYOUT)
                    if column == row:
                        above = below_diagonal_twice(block.load(MIRROR_LAYOUT), above)
                    tma.store_wait(PENDING_STORES)
                    mirror = mirrors.index(mirrored % 2)
                    mirror.store(above)
                    fence_async_shared()
                    there = mirror.reshape([1, HALF_ROWS, HALF_ROWS])
                    tma.async_copy_shared_to_global(out_desc, [tile.matrix, column, row], there)
                    mirrored += 1
            tma.store_wait(0)
            arrive_at(hand.gone, half)


@gluon.jit(do_not_specialize=["total", "per_matrix", "depth", "alpha", "beta", "diagonal"])
def symmetric_product(
    a_by_row, a_by_column, b_by_row, b_by_column, add_desc, out_desc, scales_N,
    total, per_matrix, depth, alpha, beta, diagonal,
    FORM: gl.constexpr, SQUARES: gl.constexpr, ADDS: gl.constexpr, SCALES: gl.constexpr, MIRRORS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """alpha A B^T + beta ADD + diagonal I by a persistent program: tiles program_id, program_id + num_programs, ..."""
    kind: gl.constexpr = ProductKind(FORM, SQUARES, ADDS, SCALES, MIRRORS, STAGES)
    dtype: gl.constexpr = a_by_row.dtype
    pieces = swizzled_buffers(dtype, 3 * STAGES, TILE, DEPTH)
    results = swizzled_buffers(out_desc.dtype, 4, HALF_ROWS, TILE)
    mirrors = swizzled_buffers(out_desc.dtype, 2, HALF_ROWS, HALF_ROWS)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    added = make_barriers(2, 1)
    by_column = shared_blocks(pieces, DEPTH, TILE)
    ring = SymmetricRing(pieces, by_column, shared_blocks(pieces, HALF_ROWS, DEPTH), full, empty)
    hand = make_hand(results)
    fence_async_shared()

    a = SymmetricOperand(a_by_row, a_by_column)
    b = SymmetricOperand(b_by_row, b_by_column)
    grid = SymmetricGrid(total, per_matrix, gl.cdiv(depth, DEPTH))
    numbers = ProductNumbers(alpha, scales_N, beta, diagonal)
    gl.warp_specialize(
        [
            (multiply_tiles, (ring, hand, added, grid, numbers, 0, kind)),
            (multiply_tiles, (ring, hand, added, grid, numbers, 1, kind)),
            (fetch_operands, (a, b, add_desc, ring, hand, added, grid, kind)),
            (store_tiles, (out_desc, hand, mirrors, grid, kind)),
        ],
        [4, 1, 2],
        [208, 96, 96],
    )
