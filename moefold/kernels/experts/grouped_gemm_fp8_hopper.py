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
    "swiglu"      silu(gate) * up * weight of the row, and gate and up (the pre-activation): FP8 by blocks, or bf16
    "dswiglu"     from dA: gradients of gate and up, the activation again, dA . activation / weight

Block scales need the sum of each 128 of K apart: its fp32 sum is multiplied by both scales and added to the accumulator
(promotion), 128 columns at a time, since both together do not fit in registers. One warpgroup promotes while the tensor
cores work for the other. Wide scales are applied once, in the end; with PROMOTE the sums are promoted all the same, as
tensor cores keep about 14 bits of a long sum.

Rows lie in tiles of 128, one expert each (kernels/quantise/row_tiles.py): `tiles_M4` has for each tile its expert,
first row in the order without padding, and number of rows. The routing is read on the device: the grid depends on
shapes alone. No atomics: two runs agree to the bit.
"""

# ruff: noqa: RUF059  (device code takes tuples apart by name)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moefold.kernels.experts.epilogues_fp8_hopper import epilogue_dswiglu_fp8, epilogue_swiglu_fp8
from moefold.kernels.experts.epilogues_hopper import accumulate_block, column_quarters, epilogue_plain, output_chunk
from moefold.kernels.hopper import banded_tile, split_columns

BK = gl.constexpr(128)  # of the contraction, in one step
BN = gl.constexpr(256)  # columns of a tile
HALF_BN = gl.constexpr(128)


@gluon.jit
def locate_fp8_tile(t, grid, KIND: gl.constexpr):
    """Of tile t: expert, first row, real rows, first of its steps along K, number of steps, its coordinates (m, n)."""
    tiles_M4, ends_E, first_tile_E, total, m_tiles, n_tiles, steps, band = grid
    last = gl.maximum(total - 1, 0)
    t = gl.minimum(t, last)  # lookups beyond the last tile give the last
    first = 0
    if KIND == "experts":
        tiles_of_expert = m_tiles * n_tiles
        expert = t // tiles_of_expert
        m, n = banded_tile(t % tiles_of_expert, m_tiles, n_tiles, band)
        row = gl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        real = gl.load(ends_E + expert) - row
        steps = gl.cdiv(real, BK)
        first = gl.load(first_tile_E + expert)
    else:
        m, n = banded_tile(t, m_tiles, n_tiles, band)
        expert = gl.load(tiles_M4 + 4 * m)
        row = gl.load(tiles_M4 + 4 * m + 1)
        real = gl.load(tiles_M4 + 4 * m + 2)
    return expert, row, real, first, steps, m, n


@gluon.jit
def fetch_fp8_operands(
    descs, ring, grid, N,
    KIND: gl.constexpr, END: gl.constexpr, SCALES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: keeps STAGES steps of operands, and of block scales, in flight."""
    a_desc, b_desc, sa_desc, sb_desc = descs
    a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty = ring
    tiles_M4, ends_E, first_tile_E, total, m_tiles, n_tiles, steps, band = grid
    i = 0
    # loop over this program's tiles
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, real, first, steps_t, m, n = locate_fp8_tile(t, grid, KIND)
        # loop over the contraction: wait for a free stage, then fill it
        for k in range(steps_t):
            s = i % STAGES
            bar = full.index(s)
            phase = (i // STAGES) & 1
            mbarrier.wait(empty.index(s), phase ^ 1)
            scale_bytes: gl.constexpr = 0 if SCALES == "wide" else (512 if KIND == "rows" else 512 + 4 * BN)
            mbarrier.expect(bar, (128 + BN) * BK + scale_bytes)
            at_k = k * BK
            # the left operand: two buffers, one for each consumer
            for w in gl.static_range(2):
                a = a_bufs.index(2 * s + w)
                at_m = m * 128 + 64 * w
                if KIND == "experts":
                    tma.async_copy_global_to_shared(a_desc, [first + k, at_m, 0], bar, a.reshape([1, 64, BK]))
                else:
                    tma.async_copy_global_to_shared(a_desc, [at_m, at_k], bar, a)
            # the right operand
            b = b_bufs.index(s)
            if KIND == "experts":
                tma.async_copy_global_to_shared(b_desc, [first + k, n * BN, 0], bar, b.reshape([1, BN, BK]))
            elif END == "swiglu":  # half of the tile's columns are gate, half up
                pair = b.reshape([2, HALF_BN, BK])
                tma.async_copy_global_to_shared(b_desc, [expert * 2, n * HALF_BN, at_k], bar, pair)
            else:
                tma.async_copy_global_to_shared(b_desc, [expert * N + n * BN, at_k], bar, b)
            # scales of blocks
            if SCALES == "block":
                tma.async_copy_global_to_shared(sa_desc, [first + k, m * 128], bar, sa_bufs.index(s))
                if KIND == "experts":
                    tma.async_copy_global_to_shared(sb_desc, [first + k, n * BN], bar, sb_bufs.index(s))
            i += 1


@gluon.jit
def promote(acc, part, sa, sb, PAIRED: gl.constexpr, SCALES: gl.constexpr):
    """acc + part * scales, where `sb` is a vector of columns (PAIRED) or a number."""
    if SCALES == "wide":
        acc += part
    elif PAIRED:
        acc += part * (sa[:, None] * sb[None, :])
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
def promote_half(
    halves, part, sa, sb, bufs, s, first: gl.constexpr, PAIRED: gl.constexpr, SCALES: gl.constexpr
):  # fmt: skip
    """128 columns, 64 at a time: few registers are left for the scales of columns."""
    acc0, acc1 = halves
    part0, part1 = split_columns(part, 64, HALF_BN)
    layout: gl.constexpr = acc0.type.layout
    s0 = sb
    s1 = sb
    if SCALES == "block" and PAIRED:
        columns = bufs.index(s).reshape([BN])
        s0 = columns.slice(first, 64).load(gl.SliceLayout(0, layout))
    acc0 = compute_now(promote(acc0, part0, sa, s0, PAIRED, SCALES))
    if SCALES == "block" and PAIRED:
        columns = bufs.index(s).reshape([BN])
        s1 = columns.slice(first + 64, 64).load(gl.SliceLayout(0, layout))
    acc1 = compute_now(promote(acc1, part1, sa, s1, PAIRED, SCALES))
    return acc0, acc1


@gluon.jit
def multiply_promoted(
    ring, sb_ptr, i, steps_t,
    HALF: gl.constexpr, KIND: gl.constexpr, SCALES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 x 256 sums; each step of 128 of K is promoted to fp32, 128 columns at a time. Returns 64 columns at a time."""
    a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty = ring
    sb_left, sb_right = sb_ptr
    PAIRED: gl.constexpr = KIND == "experts"
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_BN, 32]
    )
    part = gl.zeros([64, HALF_BN], gl.float32, layout)
    left = split_columns(part, 64, HALF_BN)
    right = left
    row_layout: gl.constexpr = gl.SliceLayout(1, left[0].type.layout)
    for k in range(steps_t):
        step = i + k
        s = step % STAGES
        sa = 0.0
        s0 = 0.0
        s1 = 0.0
        if SCALES == "block" and not PAIRED:  # in flight while the operands arrive
            s0 = gl.load(sb_left + k)
            s1 = gl.load(sb_right + k)
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        a = a_bufs.index(2 * s + HALF)
        b = b_bufs.index(s)
        # the left half of the columns
        part = warpgroup_mma(a, b.slice(0, HALF_BN).permute((1, 0)), part, use_acc=False, is_async=True)
        if SCALES == "block":
            sa = sa_bufs.index(s).reshape([128]).slice(64 * HALF, 64).load(row_layout)
        part = warpgroup_mma_wait(0, deps=(part,))
        left = promote_half(left, part, sa, s0, sb_bufs, s, 0, PAIRED, SCALES)
        # the right half
        part = warpgroup_mma(a, b.slice(HALF_BN, HALF_BN).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        right = promote_half(right, part, sa, s1, sb_bufs, s, HALF_BN, PAIRED, SCALES)
        mbarrier.arrive(empty.index(s))
    return left[0], left[1], right[0], right[1]


@gluon.jit
def multiply_fast(ring, i, steps_t, HALF: gl.constexpr, STAGES: gl.constexpr):
    """64 x 256 sums in the tensor cores' own accumulator. Returns 64 columns at a time."""
    a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    acc = gl.zeros([64, BN], gl.float32, layout)
    # a stage is freed one step later, when its product is done
    for k in range(steps_t):
        step = i + k
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        a = a_bufs.index(2 * s + HALF)
        b = b_bufs.index(s)
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        previous = (step + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(previous), pred=k > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    last = (i + steps_t + STAGES - 1) % STAGES
    mbarrier.arrive(empty.index(last), pred=steps_t > 0)
    return column_quarters(acc, BN)


@gluon.jit
def scaled_chunk(chunk, factors, row, column, M, N, WIDE_B: gl.constexpr, SCALES: gl.constexpr):
    """64 x 64 sums times the wide scales of their rows and columns."""
    if SCALES == "wide":
        sa_ptr, sa_row, sb_ptr = factors
        layout: gl.constexpr = chunk.type.layout
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        sa = gl.load(sa_ptr + r * sa_row, mask=r < M, other=0.0)
        if WIDE_B == "column":
            c = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
            sb = gl.load(sb_ptr + c, mask=c < N, other=0.0)
            chunk = chunk * sa[:, None] * sb[None, :]
        else:
            chunk = chunk * (sa * gl.load(sb_ptr))[:, None]
    return chunk


@gluon.jit
def chunk_column(n, c: gl.constexpr, N, END: gl.constexpr):
    """The column of out where a tile's c-th 64 columns begin. SwiGLU's tile has 128 of the gate and 128 of up."""
    if END == "swiglu":
        return n * HALF_BN + (c % 2) * 64 + (c // 2) * (N // 2)
    return n * BN + c * 64


@gluon.jit
def hand_over(
    quarters, factors, hand, out_ptr, plane, row, n, M, N, turn,
    HALF: gl.constexpr, END: gl.constexpr, SCALES: gl.constexpr, WIDE_B: gl.constexpr,
):  # fmt: skip
    """The consumer's 64 rows, scaled: added to memory, or rounded to bf16 and handed over in shared memory."""
    tile, made, gone = hand
    c0, c1, c2, c3 = quarters
    if END != "add":
        mbarrier.wait(gone.index(HALF), turn & 1 ^ 1)
    for c in gl.static_range(4):
        column = chunk_column(n, c, N, END)
        chunk = scaled_chunk(c0, factors, row, column, M, N, WIDE_B, SCALES)
        if END == "add":
            first = out_ptr + plane.to(gl.int64) * M * N
            accumulate_block(first, row, column, N, M - row, chunk)
        else:
            place = output_chunk(tile, HALF * 4 + c).reshape([64, 64])
            place.store(chunk.to(gl.bfloat16))
        c0, c1, c2 = c1, c2, c3
    if END != "add":
        fence_async_shared()
        mbarrier.arrive(made.index(HALF))


@gluon.jit
def multiply_fp8_tiles(
    ring, hand, grid, scales, out_ptr, sizes,
    HALF: gl.constexpr, KIND: gl.constexpr, END: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr,
    WIDE_B: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 of a tile's 128 rows. They are handed to the epilogue once it has taken the previous tile's."""
    a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty = ring
    tile, made, gone = hand
    tiles_M4, ends_E, first_tile_E, total, m_tiles, n_tiles, steps, band = grid
    sa_ptr, sa_expert, sa_row, sb_ptr, sb_expert, sb_row = scales
    M, N, padded = sizes
    i = 0
    facts = locate_fp8_tile(gl.program_id(0), grid, KIND)
    # loop over this program's tiles
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, real, first, steps_t, m, n = facts
        turn = t // gl.num_programs(0)
        # lookup of the next tile, in flight while this one is multiplied
        facts = locate_fp8_tile(t + gl.num_programs(0), grid, KIND)
        if KIND == "experts" or real > 64 * HALF:
            if SCALES == "block" or PROMOTE:
                blocks = (sb_ptr, sb_ptr)
                if SCALES == "block" and KIND == "rows":  # the two blocks of 128 columns
                    block = n * 2
                    other = block + 1
                    if END == "swiglu":
                        block = n
                        other = n + gl.cdiv(N // 2, HALF_BN)
                    start = sb_ptr + expert.to(gl.int64) * sb_expert
                    blocks = (start + block * sb_row, start + gl.minimum(other * sb_row, sb_expert - sb_row))
                quarters = multiply_promoted(ring, blocks, i, steps_t, HALF, KIND, SCALES, STAGES)
            else:
                quarters = multiply_fast(ring, i, steps_t, HALF, STAGES)
            first_row = m * 128 + 64 * HALF
            owner = expert if KIND == "rows" else gl.where(steps_t > 0, first, 0)  # wide scales: of its first tile
            factors = (sa_ptr + owner.to(gl.int64) * sa_expert, sa_row, sb_ptr + owner.to(gl.int64) * sb_expert)
            limit = M if KIND == "experts" else padded
            limit = gl.where(steps_t > 0, limit, 0)  # no rows: sums of zero, whatever the scales
            hand_over(quarters, factors, hand, out_ptr, expert, first_row, n, limit, N, turn, HALF, END, SCALES, WIDE_B)
        else:  # no real rows in this half: only free the stages
            for k in range(steps_t):
                step = i + k
                s = step % STAGES
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(s))
            if END != "add":
                mbarrier.wait(gone.index(HALF), turn & 1 ^ 1)
                mbarrier.arrive(made.index(HALF))
        i += steps_t


@gluon.jit
def run_fp8_epilogues(
    outs, hand, ahead, grid, N, padded, KIND: gl.constexpr, END: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """The epilogue of a tile's two halves, while the consumers multiply the next tile."""
    tile, made, gone = hand
    tiles_M4, ends_E, first_tile_E, total, m_tiles, n_tiles, steps, band = grid
    last = 0 if END == "add" else total  # the consumers add these themselves
    # loop over this program's tiles
    for t in range(gl.program_id(0), last, gl.num_programs(0)):
        expert, row, real, first, steps_t, m, n = locate_fp8_tile(t, grid, KIND)
        phase = t // gl.num_programs(0) & 1
        # where the tile goes: weight gradients to the expert's plane
        plane = 0
        if KIND == "experts":
            plane = expert
            row = m * 128
            real = 128
        # 64 rows at a time: wait until they are made, store them, free their place
        for half in range(2):
            bar = made.index(half)
            pad = m * 128 + 64 * half
            if END == "plain":
                epilogue_plain(outs[0], tile, bar, phase, half, plane, row, n, N, real, BN)
            elif END == "swiglu":
                epilogue_swiglu_fp8(outs[1], tile, bar, phase, half, row, pad, n, N // 2, real, padded, POWER_OF_TWO)
            elif END == "dswiglu":
                epilogue_dswiglu_fp8(outs[1], tile, ahead, bar, phase, half, row, pad, n, N, real, padded)
            tma.store_wait(0)
            mbarrier.arrive(gone.index(half))
            row += 64
            real -= 64


@gluon.jit(do_not_specialize=["experts", "M", "K", "padded", "band"])
def expert_gemm_fp8(
    a_desc, b_desc, sa_desc, sb_desc, sa_ptr, sa_expert, sa_row, sb_ptr, sb_expert, sb_row,
    out_desc, out_ptr, side_ptr, side_scales, h_ptr, h_scales, weight_R, dots_nP,
    tiles_M4, count, ends_E, first_tile_E,
    experts, M, N, K, padded, band,
    KIND: gl.constexpr, END: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, WIDE_B: gl.constexpr,
    POWER_OF_TWO: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr,
):  # fmt: skip
    """A persistent program: tiles program_id, program_id + num_programs, ..."""
    # prologue: shared memory for operands and scales, for a tile of results, and for a pre-activation fetched ahead
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BK], a_desc.dtype)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, BK], a_layout)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], b_desc.dtype)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_layout)
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], scale_layout)
    sb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], scale_layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BN], tile_layout)
    row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ahead_blocks: gl.constexpr = 8 if END == "dswiglu" else 1
    ahead_dtype: gl.constexpr = h_ptr.dtype.element_ty if END == "dswiglu" else gl.int8
    ahead = gl.allocate_shared_memory(ahead_dtype, [ahead_blocks, 8, 128], row_major)
    ahead_scales = gl.allocate_shared_memory(gl.float32, [4, 64], row_major)
    # barriers: stages filled and free, halves of a tile made and gone
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    made = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    gone = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(made.index(s), count=1)
        mbarrier.init(gone.index(s), count=1)
    fence_async_shared()

    # the grid of tiles
    N = N // 8 * 8  # tells the compiler that it is a multiple of 8, for stores of 16 bytes
    n_tiles = gl.cdiv(N, BN)
    if END == "swiglu":
        n_tiles = gl.cdiv(N // 2, HALF_BN)
    if KIND == "experts":
        m_tiles = gl.cdiv(M, 128)
        total = experts * m_tiles * n_tiles
    else:
        m_tiles = gl.load(count)
        total = m_tiles * n_tiles
    steps = gl.cdiv(K, BK)
    descs = (a_desc, b_desc, sa_desc, sb_desc)
    ring = (a_bufs, b_bufs, sa_bufs, sb_bufs, full, empty)
    hand = (tile, made, gone)
    grid = (tiles_M4, ends_E, first_tile_E, total, m_tiles, n_tiles, steps, band)
    scales = (sa_ptr, sa_expert, sa_row, sb_ptr, sb_expert, sb_row)
    plain_outs = (out_desc, out_ptr, None, None, None, None)
    if END == "swiglu":
        further = (side_ptr, side_scales, h_ptr, h_scales, weight_R)
    else:
        further = (out_ptr, side_ptr, h_ptr, h_scales, weight_R, dots_nP)
    outs = (plain_outs, further)
    sizes = (M, N, padded)
    # two consumer warpgroups, one producer warp, two epilogue warps
    gl.warp_specialize(
        [
            (
                multiply_fp8_tiles,
                (ring, hand, grid, scales, out_ptr, sizes, 0, KIND, END, SCALES, PROMOTE, WIDE_B, STAGES),
            ),
            (
                multiply_fp8_tiles,
                (ring, hand, grid, scales, out_ptr, sizes, 1, KIND, END, SCALES, PROMOTE, WIDE_B, STAGES),
            ),
            (fetch_fp8_operands, (descs, ring, grid, N, KIND, END, SCALES, STAGES)),
            (run_fp8_epilogues, (outs, hand, (ahead, ahead_scales), grid, N, padded, KIND, END, POWER_OF_TWO)),
        ],
        [4, 1, 2],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS],
    )
