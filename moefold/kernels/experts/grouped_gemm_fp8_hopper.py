"""The grouped FP8 GEMMs of an expert MLP for Hopper, in Gluon: one persistent kernel, two contractions, four epilogues.

FP8 wgmma reads both operands with the contraction contiguous, so transposed copies are made where values are quantised
(kernels/quantise/). The roles are those of grouped_gemm_hopper.py: one producer warp (TMA), two consumer warpgroups
(wgmma), each for 64 rows of a tile of 128 x 256, and two warps for the epilogue of the previous tile.

    contraction   out               a                     b                     sum over
    "rows"        rows x N          rows (P, K)           weights (E, N, K)     K
    "experts"     (E, M) x N        columns (., M, 128)   columns (., N, 128)   the expert's rows, tile by tile

    scales        a                                   b
    "block"       a row's 128 values of K             "rows": 128 x 128 values; "experts": a row's 128 values of K
    "wide"        all of a row                        all of a column of out, or of an expert

    epilogue      writes
    "plain"       out
    "add"         out += product, in the precision of out ("experts": accumulation of weight gradients)
    "swiglu"      silu(gate) * up * weight of the row, and gate and up (the pre-activation): FP8 by blocks, or bf16; the
                  first may be FP8 with scales of experts that are known before
    "dswiglu"     from dA: gradients of gate and up, the activation again, dA . activation / weight

Block scales need the sum of each 128 of K apart: its fp32 sum is multiplied by both scales and added to the accumulator
(promotion), 128 columns at a time, since both together do not fit in registers. One warpgroup promotes while the tensor
cores work for the other. Wide scales are applied once, in the end; with PROMOTE the sums are promoted all the same, as
tensor cores keep about 14 bits of a long sum.

Rows lie in tiles of 128, one expert each (kernels/quantise/row_tiles.py): `tiles_M4` has for each tile its expert,
first row in the order without padding, and number of rows. The routing is read on the device: the grid depends on
shapes alone. No atomics: two runs agree to the bit.
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

from moefold.kernels.experts.epilogues_fp8_hopper import (
    Fp8Outputs,
    PreActivationAhead,
    epilogue_dswiglu_fp8,
    epilogue_swiglu_fp8,
)
from moefold.kernels.experts.epilogues_hopper import (
    accumulate_block,
    block_columns,
    block_rows,
    column_quarters,
    epilogue_plain,
    load_or_zero,
    output_chunk,
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
from moefold.kernels.hopper import (
    make_barriers,
    split_columns,
    swizzled_buffers,
    wait_until_filled,
    wait_until_free,
    wgmma_layout,
)

BK = gl.constexpr(128)  # of the contraction, in one step
BN = gl.constexpr(256)  # columns of a tile
HALF_BN = gl.constexpr(128)


class Fp8GemmKind(NamedTuple):
    """What the kernel is compiled for: contraction, epilogue, scales, whether sums are promoted, whether a wide scale
    of b is that of a column or of an expert, stages in flight."""

    KIND: Any
    END: Any
    SCALES: Any
    PROMOTE: Any
    WIDE_B: Any
    STAGES: Any


class ScaledRing(NamedTuple):
    """The stages: operands and block scales in shared memory, and barriers of stages filled and free."""

    a_bufs: Any
    b_bufs: Any
    sa_bufs: Any
    sb_bufs: Any
    full: Any
    empty: Any


class ScalePointers(NamedTuple):
    """Scales of a and b, with the steps from an expert to the next and from a row to the next."""

    a: Any
    b: Any
    a_expert: Any
    a_row: Any
    b_expert: Any
    b_row: Any


class ExpertScales(NamedTuple):
    """Where one expert's wide scales lie: of a, with the step of a row, and of b."""

    a: Any
    a_row: Any
    b: Any


@gluon.jit
def locate_fp8_tile(t, grid, gemm):
    BY_EXPERT: gl.constexpr = gemm.KIND == "experts"
    return locate_tile(t, grid, BY_EXPERT, BK)


@gluon.jit
def fetch_fp8_operands(descs, ring, grid, N, gemm):
    """The producer: keeps STAGES steps of operands, and of block scales, in flight."""
    a_desc, b_desc, sa_desc, sb_desc = descs
    BY_EXPERT: gl.constexpr = gemm.KIND == "experts"
    BY_BLOCK: gl.constexpr = gemm.SCALES == "block"
    column_scales: gl.constexpr = BN if BY_EXPERT else 0
    row_and_column_scales: gl.constexpr = 128 + column_scales
    scale_bytes: gl.constexpr = 4 * row_and_column_scales if BY_BLOCK else 0
    rows_and_columns: gl.constexpr = 128 + BN
    stage_bytes: gl.constexpr = rows_and_columns * BK + scale_bytes
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    i = 0
    # loop over this program's tiles
    for t in range(program, grid.total, programs):
        tile = locate_fp8_tile(t, grid, gemm)
        row = tile.m * 128
        column = tile.n * BN
        # loop over the contraction: wait for a free stage, then fill it
        for k in range(tile.steps):
            s = wait_until_free(ring.empty, i, gemm.STAGES)
            bar = ring.full.index(s)
            mbarrier.expect(bar, stage_bytes)
            if BY_EXPERT:
                place = tile.start + k
                fetch_columns(a_desc, b_desc, ring, bar, s, place, row, column)
            else:
                place = k
                at_k = k * BK
                fetch_rows(a_desc, ring, bar, s, row, at_k)
                fetch_weights(b_desc, ring, bar, s, tile, at_k, N, gemm)
            if BY_BLOCK:
                fetch_scales(sa_desc, ring.sa_bufs, bar, s, place, row)
            if BY_BLOCK and BY_EXPERT:
                fetch_scales(sb_desc, ring.sb_bufs, bar, s, place, column)
            i += 1


@gluon.jit
def fetch_scales(desc, bufs, bar, s, place, first):
    """Scales of blocks: those of the step `place`, of rows or columns from `first` on."""
    scales = bufs.index(s)
    tma.async_copy_global_to_shared(desc, [place, first], bar, scales)


@gluon.jit
def fetch_rows(a_desc, ring, bar, s, row, at_k):
    """The left operand: two buffers, one for each consumer."""
    for w in gl.static_range(2):
        a = left_buffer(ring, s, w)
        half = row + 64 * w
        a_at = [half, at_k]
        tma.async_copy_global_to_shared(a_desc, a_at, bar, a)


@gluon.jit
def fetch_weights(b_desc, ring, bar, s, tile, at_k, N, gemm):
    """The right operand of rows."""
    b = ring.b_bufs.index(s)
    if gemm.END == "swiglu":  # half of the tile's columns are gate, half up
        plane = tile.expert * 2
        row = tile.n * HALF_BN
        b_at = [plane, row, at_k]
        b = b.reshape([2, HALF_BN, BK])
    else:
        first_row = tile.expert * N
        row = first_row + tile.n * BN
        b_at = [row, at_k]
    tma.async_copy_global_to_shared(b_desc, b_at, bar, b)


@gluon.jit
def fetch_columns(a_desc, b_desc, ring, bar, s, place, row, column):
    """Both operands of weight gradients, for row and column of the result; `place`: the tile of rows to sum over."""
    for w in gl.static_range(2):
        a = left_buffer(ring, s, w)
        a_plane = a.reshape([1, 64, BK])
        half = row + 64 * w
        a_at = [place, half, 0]
        tma.async_copy_global_to_shared(a_desc, a_at, bar, a_plane)
    b = ring.b_bufs.index(s)
    b_plane = b.reshape([1, BN, BK])
    b_at = [place, column, 0]
    tma.async_copy_global_to_shared(b_desc, b_at, bar, b_plane)


@gluon.jit
def promote(acc, part, sa, sb, gemm):
    """acc + part * scales, where `sb` is a vector of columns ("experts") or a number."""
    if gemm.SCALES == "wide":
        acc += part
    elif gemm.KIND == "experts":
        row_factor = sa[:, None]
        factor = row_factor * sb[None, :]
        acc += part * factor
    else:
        factor = sa * sb
        acc += part * factor[:, None]
    return acc


@gluon.jit
def compute_now(x):
    """The identity, which the compiler does not move: otherwise it puts off the promotion of the left half until the
    right half is multiplied, and the sums of both do not fit in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def load_column_scales(sb_bufs, s, first: gl.constexpr, layout: gl.constexpr):
    """Those of 64 columns, from shared memory."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    line = sb_bufs.index(s)
    scales = line.reshape([BN])
    part = scales.slice(first, 64)
    return part.load(columns)


@gluon.jit
def promote_half(halves, part, sa, sb, sb_bufs, s, first: gl.constexpr, gemm):
    """128 columns, 64 at a time: few registers are left for the scales of columns."""
    acc0, acc1 = halves
    part0, part1 = split_columns(part, 64, HALF_BN)
    layout: gl.constexpr = acc0.type.layout
    BY_BLOCK: gl.constexpr = gemm.SCALES == "block"
    BY_COLUMN: gl.constexpr = BY_BLOCK and gemm.KIND == "experts"
    second: gl.constexpr = first + 64
    s0 = sb
    s1 = sb
    # the first 64 columns
    if BY_COLUMN:
        s0 = load_column_scales(sb_bufs, s, first, layout)
    sums0 = promote(acc0, part0, sa, s0, gemm)
    sums0 = compute_now(sums0)
    # the others
    if BY_COLUMN:
        s1 = load_column_scales(sb_bufs, s, second, layout)
    sums1 = promote(acc1, part1, sa, s1, gemm)
    sums1 = compute_now(sums1)
    return sums0, sums1


@gluon.jit
def multiply_step(a, b, part, FIRST: gl.constexpr):
    """Start the product of one step with 128 columns."""
    rows = b.slice(FIRST, HALF_BN)
    columns = rows.permute((1, 0))
    return warpgroup_mma(a, columns, part, use_acc=False, is_async=True)


@gluon.jit
def multiply_promoted(ring, sb_left, sb_right, i, steps, HALF: gl.constexpr, gemm):
    """64 x 256 sums; each step of 128 of K is promoted to fp32, 128 columns at a time. Returns 64 columns at a time."""
    BY_BLOCK: gl.constexpr = gemm.SCALES == "block"
    above: gl.constexpr = 64 * HALF
    layout: gl.constexpr = wgmma_layout(HALF_BN, 32)
    part = gl.zeros([64, HALF_BN], gl.float32, layout)
    left = split_columns(part, 64, HALF_BN)
    right = left
    quarter = left[0]
    half_layout: gl.constexpr = quarter.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, half_layout)
    # main loop over the contraction
    for k in range(steps):
        sa = 0.0
        s0 = 0.0
        s1 = 0.0
        if BY_BLOCK and gemm.KIND == "rows":  # in flight while the operands arrive
            s0 = gl.load(sb_left + k)
            s1 = gl.load(sb_right + k)
        step = i + k
        s = wait_until_filled(ring.full, step, gemm.STAGES)
        a = left_buffer(ring, s, HALF)
        b = ring.b_bufs.index(s)
        # the left half of the columns
        part = multiply_step(a, b, part, 0)
        if BY_BLOCK:
            line = ring.sa_bufs.index(s)
            row_scales = line.reshape([128])
            my_scales = row_scales.slice(above, 64)
            sa = my_scales.load(row_layout)
        part = warpgroup_mma_wait(0, deps=(part,))
        left = promote_half(left, part, sa, s0, ring.sb_bufs, s, 0, gemm)
        # the right half
        part = multiply_step(a, b, part, HALF_BN)
        part = warpgroup_mma_wait(0, deps=(part,))
        right = promote_half(right, part, sa, s1, ring.sb_bufs, s, HALF_BN, gemm)
        arrive_at(ring.empty, s)
    return left + right


@gluon.jit
def scaled_chunk(chunk, wide, row, column, M, N, gemm):
    """64 x 64 sums times the wide scales of their rows and columns."""
    if gemm.SCALES == "wide":
        layout: gl.constexpr = chunk.type.layout
        r = row + block_rows(64, layout)
        sa_at = wide.a + r * wide.a_row
        sa = load_or_zero(sa_at, r < M)
        if gemm.WIDE_B == "column":
            c = column + block_columns(64, layout)
            inside = c < N
            sb = load_or_zero(wide.b + c, inside)
            chunk = chunk * sa[:, None]
            chunk = chunk * sb[None, :]
        else:
            sb = gl.load(wide.b)
            factor = sa * sb
            chunk = chunk * factor[:, None]
    return chunk


@gluon.jit
def chunk_column(n, c: gl.constexpr, N, END: gl.constexpr):
    """The column of out where a tile's c-th 64 columns begin. SwiGLU's tile has 128 of the gate and 128 of up."""
    if END == "swiglu":
        inside: gl.constexpr = c % 2 * 64
        IS_UP: gl.constexpr = c // 2
        column = n * HALF_BN + inside
        return column + IS_UP * (N // 2)
    return n * BN + c * 64


@gluon.jit
def hand_over(quarters, wide, hand, out_ptr, tile, M, N, turn, HALF: gl.constexpr, gemm):
    """The consumer's 64 rows, scaled: added to memory, or rounded to bf16 and handed over in shared memory."""
    c0, c1, c2, c3 = quarters
    above: gl.constexpr = 64 * HALF
    row = tile.m * 128 + above
    if gemm.END != "add":
        wait_until_gone(hand, turn, HALF)
    # 64 columns at a time
    for c in gl.static_range(4):
        column = chunk_column(tile.n, c, N, gemm.END)
        chunk = scaled_chunk(c0, wide, row, column, M, N, gemm)
        if gemm.END == "add":
            expert = tile.expert.to(gl.int64)
            first = out_ptr + expert * M * N
            real = M - row
            accumulate_block(first, row, column, N, real, chunk)
        else:
            plane = output_chunk(hand.tile, HALF * 4 + c)
            rounded = chunk.to(gl.bfloat16)
            place = plane.reshape([64, 64])
            place.store(rounded)
        c0, c1, c2 = c1, c2, c3
    if gemm.END != "add":
        fence_async_shared()
        arrive_at(hand.made, HALF)


@gluon.jit
def column_block_scales(scales, tile, N, gemm):
    """Where the block scales of a tile's left and right 128 columns lie."""
    left = scales.b
    right = scales.b
    BY_BLOCK: gl.constexpr = gemm.SCALES == "block"
    if BY_BLOCK and gemm.KIND == "rows":
        block = tile.n * 2
        other = block + 1
        if gemm.END == "swiglu":  # gate and up
            block = tile.n
            inner = N // 2
            gate_blocks = gl.cdiv(inner, HALF_BN)
            other = tile.n + gate_blocks
        expert = tile.expert.to(gl.int64)
        start = scales.b + expert * scales.b_expert
        last = scales.b_expert - scales.b_row
        left = start + block * scales.b_row
        other_at = other * scales.b_row
        right = start + gl.minimum(other_at, last)
    return left, right


@gluon.jit
def wide_scales(scales, tile, KIND: gl.constexpr):
    """Wide scales of the tile's expert: those of the expert or, for weight gradients, those of its first tile."""
    owner = tile.expert
    if KIND == "experts":
        has_rows = tile.steps > 0
        owner = gl.where(has_rows, tile.start, 0)
    number = owner.to(gl.int64)
    a = scales.a + number * scales.a_expert
    b = scales.b + number * scales.b_expert
    return ExpertScales(a, scales.a_row, b)


@gluon.jit
def multiply_fp8_tiles(ring, hand, grid, scales, out_ptr, M, N, padded, HALF: gl.constexpr, gemm):
    """A consumer: 64 of a tile's 128 rows. They are handed to the epilogue once it has taken the previous tile's."""
    BY_EXPERT: gl.constexpr = gemm.KIND == "experts"
    BY_BLOCK: gl.constexpr = gemm.SCALES == "block"
    product: gl.constexpr = HalfProduct(BN, 32, gemm.STAGES, False, True)
    above: gl.constexpr = 64 * HALF
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    i = 0
    following = locate_fp8_tile(program, grid, gemm)
    # loop over this program's tiles
    for t in range(program, grid.total, programs):
        tile = following
        turn = t // programs
        steps = tile.steps
        # lookup of the next tile, in flight while this one is multiplied
        following = locate_fp8_tile(t + programs, grid, gemm)
        if BY_EXPERT or tile.real > above:
            if BY_BLOCK or gemm.PROMOTE:
                sb_left, sb_right = column_block_scales(scales, tile, N, gemm)
                quarters = multiply_promoted(ring, sb_left, sb_right, i, steps, HALF, gemm)
            else:
                acc = multiply_half(ring, i, steps, HALF, product)
                quarters = column_quarters(acc, BN)
            wide = wide_scales(scales, tile, gemm.KIND)
            limit = M if BY_EXPERT else padded
            has_rows = steps > 0
            limit = gl.where(has_rows, limit, 0)  # no rows: sums of zero, whatever the scales
            hand_over(quarters, wide, hand, out_ptr, tile, limit, N, turn, HALF, gemm)
        else:
            skip_half(ring, hand, i, steps, turn, HALF, gemm.STAGES)
        i += steps


@gluon.jit
def run_fp8_epilogues(outs, hand, ahead, grid, N, padded, gemm, POWER_OF_TWO: gl.constexpr):
    """The epilogue of a tile's two halves, while the consumers multiply the next tile."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    last = 0 if gemm.END == "add" else grid.total  # the consumers add these themselves
    # loop over this program's tiles
    for t in range(program, last, programs):
        tile = locate_fp8_tile(t, grid, gemm)
        phase = t // programs & 1
        # where the tile goes: weight gradients to the expert's plane
        plane = 0
        row = tile.row
        real = tile.real
        if gemm.KIND == "experts":
            plane = tile.expert
            row = tile.m * 128
            real = 128
        # 64 rows at a time: wait until they are made, store them, free their place
        for half in range(2):
            made = hand.made.index(half)
            pad = tile.m * 128 + 64 * half
            here = HalfTile(half, made, phase, plane, row, pad, real, tile.n)
            if gemm.END == "plain":
                epilogue_plain(outs, hand.tile, here, N, BN)
            elif gemm.END == "swiglu":
                inner = N // 2
                epilogue_swiglu_fp8(outs, hand.tile, here, tile.expert, inner, padded, POWER_OF_TWO)
            elif gemm.END == "dswiglu":
                epilogue_dswiglu_fp8(outs, hand.tile, ahead, here, N, padded)
            tma.store_wait(0)
            arrive_at(hand.gone, half)
            row += 64
            real -= 64


@gluon.jit(do_not_specialize=["experts", "M", "K", "padded", "band"])
def expert_gemm_fp8(
    a_desc, b_desc, sa_ptr, sb_ptr, sa_desc, sb_desc, sa_expert, sa_row, sb_expert, sb_row,
    out_desc, out_ptr, side_ptr, side_scales, h_ptr, h_scales, weight_R, dots_nP, side_rows_E,
    tiles_M4, count, ends_E, first_tile_E,
    experts, M, N, K, padded, band,
    KIND: gl.constexpr, END: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, WIDE_B: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr,
):  # fmt: skip
    """A persistent program: tiles program_id, program_id + num_programs, ..."""
    gemm: gl.constexpr = Fp8GemmKind(KIND, END, SCALES, PROMOTE, WIDE_B, STAGES)
    # prologue: shared memory for operands and scales
    a_bufs = swizzled_buffers(a_desc.dtype, 2 * STAGES, 64, BK)
    b_bufs = swizzled_buffers(b_desc.dtype, STAGES, BN, BK)
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    row_scale_shape: gl.constexpr = [STAGES, 1, 128]
    sa_bufs = gl.allocate_shared_memory(gl.float32, row_scale_shape, scale_layout)
    column_scale_shape: gl.constexpr = [STAGES, 1, BN]
    sb_bufs = gl.allocate_shared_memory(gl.float32, column_scale_shape, scale_layout)
    # for a tile of results, and for a pre-activation fetched ahead
    chunk: gl.constexpr = [64, 64]
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(chunk, gl.bfloat16)
    tile_shape: gl.constexpr = [2, 64, BN]
    results = gl.allocate_shared_memory(gl.bfloat16, tile_shape, tile_layout)
    row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    READS_H: gl.constexpr = END == "dswiglu"
    ahead_blocks: gl.constexpr = 8 if READS_H else 1
    ahead_dtype: gl.constexpr = h_ptr.dtype.element_ty if READS_H else gl.int8
    ahead_shape: gl.constexpr = [ahead_blocks, 8, 128]
    h_blocks = gl.allocate_shared_memory(ahead_dtype, ahead_shape, row_major)
    h_scale_shape: gl.constexpr = [4, 64]
    h_scale_rows = gl.allocate_shared_memory(gl.float32, h_scale_shape, row_major)
    ahead = PreActivationAhead(h_blocks, h_scale_rows)
    # barriers: stages filled and free, halves of a tile made and gone
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    ring = ScaledRing(a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty)
    hand = make_hand(results)
    fence_async_shared()

    # the grid of tiles
    N = N // 8 * 8  # tells the compiler that it is a multiple of 8, for stores of 16 bytes
    n_tiles = gl.cdiv(N, BN)
    if END == "swiglu":
        inner = N // 2
        n_tiles = gl.cdiv(inner, HALF_BN)
    steps = gl.cdiv(K, BK)
    by_expert: gl.constexpr = KIND == "experts"
    grid = grid_of_tiles(tiles_M4, count, ends_E, first_tile_E, experts, M, n_tiles, steps, band, by_expert)
    descs = (a_desc, b_desc, sa_desc, sb_desc)
    scales = ScalePointers(sa_ptr, sb_ptr, sa_expert, sa_row, sb_expert, sb_row)
    outs = Fp8Outputs(out_desc, out_ptr, side_ptr, side_scales, h_ptr, h_scales, weight_R, dots_nP, side_rows_E)
    # two consumer warpgroups, one producer warp, two epilogue warps
    gl.warp_specialize(
        [
            (multiply_fp8_tiles, (ring, hand, grid, scales, out_ptr, M, N, padded, 0, gemm)),
            (multiply_fp8_tiles, (ring, hand, grid, scales, out_ptr, M, N, padded, 1, gemm)),
            (fetch_fp8_operands, (descs, ring, grid, N, gemm)),
            (run_fp8_epilogues, (outs, hand, ahead, grid, N, padded, gemm, POWER_OF_TWO)),
        ],
        [4, 1, 2],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS],
    )
