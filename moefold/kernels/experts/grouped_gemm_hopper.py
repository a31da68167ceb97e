"""The grouped GEMMs of an expert MLP for Hopper, in Gluon: one persistent kernel, three contractions, four epilogues.

One warp is the producer (TMA loads, running ahead over tile boundaries); two warpgroups are consumers (wgmma), each for
64 rows of a 128-row tile; two warps run the epilogue of the previous tile meanwhile (epilogues_hopper.py).

    contraction   out                        a                  b                   sum over
    "nt"          rows x N                   rows (R, K)        weights (E, N, K)   K
    "nn"          rows x N                   rows (R, K)        weights (E, K, N)   K
    "tn"          (E, M) x N                 rows (R, M)        rows (R, N)         the expert's rows

    epilogue      writes
    "plain"       out
    "add"         out += product, in the precision of out ("tn": accumulation of weight gradients)
    "swiglu"      out = silu(gate) * up * weight of the row, side = gate and up (the pre-activation)
    "dswiglu"     from dA: gradients of gate and up in their place, side = the activation again,
                  dots = dA . activation / weight

"nt" and "nn" may have a tail: the contraction goes on over the columns of `low`, rows (R, L), with a right operand of
its own, (E, N, L) or (E, L, N). So the product of an adapter, B (A x), is added in the accumulator
(expert_mlp_adapted.py). L is a multiple of 8; behind it the left operand is zeros.

The weights may be those of some experts alone, from `first` on; tiles are then of these experts.

Rows lie sorted by expert. They are padded, each expert beginning at a multiple of 64 and zeros between, on the left of
"swiglu" and on the right of "tn", and in the activation that "dswiglu" writes for that. Elsewhere a tile's operands may
reach into the next expert's rows; their results are not stored ("nt", "nn"), or they are multiplied by zeros ("tn", so
the left operand must be finite in the 63 rows behind an expert's last: `zero_rows_behind`). Widths need only be
multiples of 8: beyond them TMA loads zeros, and nothing is stored.

`tiles_M4` has for each tile of 128 rows: expert, first row, real rows, first padded row. The routing is read on the
device: the grid depends on shapes alone. Operands are bf16 or fp16, as is a plain result. No atomics: two runs agree to
the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moefold.kernels.experts.epilogues_hopper import (
    EpilogueOutputs,
    epilogue_add,
    epilogue_dswiglu,
    epilogue_plain,
    epilogue_swiglu,
)
from moefold.kernels.experts.gemm_tiles_hopper import (
    HalfProduct,
    HalfTile,
    arrive_at,
    grid_of_tiles,
    left_buffer,
    locate_tile,
    make_hand,
    multiply_half,
    skip_half,
    wait_until_gone,
)
from moefold.kernels.hopper import make_barriers, swizzled_buffers, wait_until_free


class GemmKind(NamedTuple):
    """What the kernel is compiled for: contraction, epilogue, columns of a tile, stages in flight."""

    KIND: Any
    END: Any
    BN: Any
    STAGES: Any


class OperandRing(NamedTuple):
    """The stages: operands in shared memory, and barriers of stages filled and free."""

    a_bufs: Any
    b_bufs: Any
    full: Any
    empty: Any


class GemmOperands(NamedTuple):
    """Both operands, and those of the tail with its depth; without a tail they are None."""

    a_desc: Any
    b_desc: Any
    low_desc: Any
    tail_desc: Any
    depth: Any


@gluon.jit
def locate(t, grid, gemm):
    BY_EXPERT: gl.constexpr = gemm.KIND == "tn"
    return locate_tile(t, grid, BY_EXPERT, 64)


@gluon.jit
def fetch_operands(operands, ring, grid, N, K, first, gemm):
    """The producer: keeps STAGES steps of operands in flight, across tile boundaries."""
    rows_and_columns: gl.constexpr = 128 + gemm.BN
    operand_bytes: gl.constexpr = rows_and_columns * 64 * 2
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    HAS_TAIL: gl.constexpr = operands.low_desc is not None
    i = 0
    # loop over this program's tiles
    for t in range(program, grid.total, programs):
        tile = locate(t, grid, gemm)
        steps = tile.steps
        if HAS_TAIL:
            steps = gl.cdiv(K, 64)
        row = tile.row
        if gemm.END == "swiglu":
            row = tile.start
        # loop over the contraction: wait for a free stage, then fill it
        for k in range(steps):
            s = wait_until_free(ring.empty, i, gemm.STAGES)
            bar = ring.full.index(s)
            mbarrier.expect(bar, operand_bytes)
            at_k = k * 64
            fetch_left(operands.a_desc, bar, ring, s, tile, row, at_k, gemm)
            fetch_right(operands.b_desc, bar, ring, s, tile, tile.expert - first, at_k, N, K, gemm)
            i += 1
        # the tail: rows as they are, of all experts
        if HAS_TAIL:
            for k in range(tile.steps - steps):
                s = wait_until_free(ring.empty, i, gemm.STAGES)
                bar = ring.full.index(s)
                mbarrier.expect(bar, operand_bytes)
                at_k = k * 64
                fetch_left(operands.low_desc, bar, ring, s, tile, tile.row, at_k, gemm)
                fetch_right(operands.tail_desc, bar, ring, s, tile, tile.expert, at_k, N, operands.depth, gemm)
                i += 1


@gluon.jit
def fetch_left(desc, bar, ring, s, tile, row, at_k, gemm):
    """The left operand: two buffers, one for each consumer."""
    for w in gl.static_range(2):
        half = 64 * w
        if gemm.KIND == "tn":
            column = tile.m * 128
            a_at = [row + at_k, column + half]
        else:
            a_at = [row + half, at_k]
        a = left_buffer(ring, s, w)
        tma.async_copy_global_to_shared(desc, a_at, bar, a)


@gluon.jit
def fetch_right(desc, bar, ring, s, tile, expert, at_k, N, depth, gemm):
    """The right operand: one buffer, which both consumers read. `depth`: rows of an expert's matrix in "nn"."""
    b = ring.b_bufs.index(s)
    column = tile.n * gemm.BN
    if gemm.KIND == "tn":
        b_at = [tile.start + at_k, column]
    elif gemm.KIND == "nn":
        first_row = expert * depth
        b_at = [first_row + at_k, column]
    elif gemm.END == "swiglu":  # half of the tile's columns are gate, half up
        half: gl.constexpr = gemm.BN // 2
        b = b.reshape([2, half, 64])
        plane = expert * 2
        row = tile.n * half
        b_at = [plane, row, at_k]
    else:
        first_row = expert * N
        b_at = [first_row + column, at_k]
    tma.async_copy_global_to_shared(desc, b_at, bar, b)


@gluon.jit
def multiply_tiles(ring, hand, grid, out_ptr, M, N, HALF: gl.constexpr, gemm):
    """A consumer: 64 of a tile's 128 rows. They are handed to the epilogue once it has taken the previous tile's."""
    BY_EXPERT: gl.constexpr = gemm.KIND == "tn"
    B_BY_ROW: gl.constexpr = gemm.KIND == "nt"
    product: gl.constexpr = HalfProduct(gemm.BN, 16, gemm.STAGES, BY_EXPERT, B_BY_ROW)
    above: gl.constexpr = 64 * HALF
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    i = 0
    following = locate(program, grid, gemm)
    # loop over this program's tiles
    for t in range(program, grid.total, programs):
        tile = following
        turn = t // programs
        steps = tile.steps
        # lookup of the next tile, in flight while this one is multiplied
        following = locate(t + programs, grid, gemm)
        if BY_EXPERT or tile.real > above:
            acc = multiply_half(ring, i, steps, HALF, product)
            # the result: added to memory here, or rounded and handed over in shared memory
            if gemm.END == "add":
                first_row = tile.m * 128 + above
                first_column = tile.n * gemm.BN
                epilogue_add(out_ptr, acc, tile.expert, first_row, first_column, M, N, gemm.BN)
            else:
                wait_until_gone(hand, turn, HALF)
                rounded = acc.to(hand.tile.dtype)
                place = hand.tile.index(HALF)
                place.store(rounded)
                fence_async_shared()
                arrive_at(hand.made, HALF)
        else:
            skip_half(ring, hand, i, steps, turn, HALF, gemm.STAGES)
        i += steps


@gluon.jit
def run_epilogues(outs, hand, ahead, grid, N, rows, gemm):
    """The epilogue of a tile's two halves, while the consumers multiply the next tile."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    last = 0 if gemm.END == "add" else grid.total  # the consumers add these themselves
    # loop over this program's tiles
    for t in range(program, last, programs):
        tile = locate(t, grid, gemm)
        phase = t // programs & 1
        # where the tile goes: weight gradients to the expert's plane
        plane = 0
        row = tile.row
        pad = tile.start
        real = tile.real
        if gemm.KIND == "tn":
            plane = tile.expert
            row = tile.m * 128
            real = 128
        # 64 rows at a time: wait until they are made, store them, free their place
        for half in range(2):
            made = hand.made.index(half)
            here = HalfTile(half, made, phase, plane, row, pad, real, tile.n)
            if gemm.END == "plain":
                epilogue_plain(outs, hand.tile, here, N, gemm.BN)
            elif gemm.END == "swiglu":
                epilogue_swiglu(outs, hand.tile, here, N, gemm.BN)
            elif gemm.END == "dswiglu":
                epilogue_dswiglu(outs, hand.tile, ahead, here, N, rows, gemm.BN)
            tma.store_wait(0)
            arrive_at(hand.gone, half)
            row += 64
            pad += 64
            real -= 64


@gluon.jit(do_not_specialize=["experts", "M", "K", "rows", "band", "depth", "first"])
def expert_gemm(
    a_desc, b_desc, low_desc, tail_desc, out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR,
    tiles_M4, count, ends_E, pads_E, experts, M, N, K, rows, band, depth, first,
    KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A persistent program: tiles program_id, program_id + num_programs, ..."""
    gemm: gl.constexpr = GemmKind(KIND, END, BN, STAGES)
    # prologue: shared memory for operands, for a tile of results, and for gate and up fetched ahead
    dtype: gl.constexpr = a_desc.dtype
    a_bufs = swizzled_buffers(dtype, 2 * STAGES, 64, 64)
    if KIND == "nt":
        b_bufs = swizzled_buffers(dtype, STAGES, BN, 64)
    else:
        b_bufs = swizzled_buffers(dtype, STAGES, 64, BN)
    tile_shape: gl.constexpr = [2, 64, BN]
    result_dtype: gl.constexpr = out_desc.dtype if END == "plain" else dtype
    results = gl.allocate_shared_memory(result_dtype, tile_shape, a_desc.layout)
    row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ahead_shape: gl.constexpr = [8, 16, 64]
    ahead = gl.allocate_shared_memory(gl.bfloat16, ahead_shape, row_major)
    # barriers: stages filled and free, halves of a tile made and gone
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    ring = OperandRing(a_bufs, b_bufs, full, empty)
    hand = make_hand(results)
    fence_async_shared()

    # the grid of tiles
    N = N // 8 * 8  # tells the compiler that it is a multiple of 8, for loads of 16 bytes
    n_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 64)
    if low_desc is not None:
        steps += gl.cdiv(depth, 64)
    operands = GemmOperands(a_desc, b_desc, low_desc, tail_desc, depth)
    BY_EXPERT: gl.constexpr = KIND == "tn"
    grid = grid_of_tiles(tiles_M4, count, ends_E, pads_E, experts, M, n_tiles, steps, band, BY_EXPERT)
    outs = EpilogueOutputs(out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR)
    # two consumer warpgroups, one producer warp, two epilogue warps
    gl.warp_specialize(
        [
            (multiply_tiles, (ring, hand, grid, out_ptr, M, N, 0, gemm)),
            (multiply_tiles, (ring, hand, grid, out_ptr, M, N, 1, gemm)),
            (fetch_operands, (operands, ring, grid, N, K, first, gemm)),
            (run_epilogues, (outs, hand, ahead, grid, N, rows, gemm)),
        ],
        [4, 1, 2],
        [192, 120, 120],
    )
