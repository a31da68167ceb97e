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

Rows lie sorted by expert. They are padded, each expert beginning at a multiple of 64 and zeros between, on the left of
"swiglu" and on the right of "tn", and in the activation that "dswiglu" writes for that. Elsewhere a tile's operands may
reach into the next expert's rows; their results are not stored ("nt", "nn"), or they are multiplied by zeros ("tn", so
the left operand must be finite in the 63 rows behind an expert's last: `zero_rows_behind`). Widths need only be
multiples of 8: beyond them TMA loads zeros, and nothing is stored.

`tiles_M4` has for each tile of 128 rows: expert, first row, real rows, first padded row. The routing is read on the
device: the grid depends on shapes alone. No atomics: two runs agree to the bit.
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

from moefold.kernels.experts.epilogues_hopper import epilogue_add, epilogue_dswiglu, epilogue_plain, epilogue_swiglu
from moefold.kernels.hopper import banded_tile


@gluon.jit
def locate_tile(t, grid, KIND: gl.constexpr):
    """Of tile t: expert, first row, first padded row, real rows, steps of the contraction, its coordinates (m, n)."""
    tiles_M4, ends_E, pads_E, total, m_tiles, n_tiles, steps, band = grid
    last = gl.maximum(total - 1, 0)
    t = gl.minimum(t, last)  # lookups beyond the last tile give the last
    if KIND == "tn":
        tiles_of_expert = m_tiles * n_tiles
        expert = t // tiles_of_expert
        m, n = banded_tile(t % tiles_of_expert, m_tiles, n_tiles, band)
        row = gl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        real = gl.load(ends_E + expert) - row
        steps = gl.cdiv(real, 64)
        pad = gl.load(pads_E + expert)
    else:
        m, n = banded_tile(t, m_tiles, n_tiles, band)
        expert = gl.load(tiles_M4 + 4 * m)
        row = gl.load(tiles_M4 + 4 * m + 1)
        real = gl.load(tiles_M4 + 4 * m + 2)
        pad = gl.load(tiles_M4 + 4 * m + 3)
    return expert, row, pad, real, steps, m, n


@gluon.jit
def fetch_operands(
    descs, ring, grid, N, K,
    KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: keeps STAGES steps of operands in flight, across tile boundaries."""
    a_desc, b_desc = descs
    a_bufs, b_bufs, full, empty = ring
    tiles_M4, ends_E, pads_E, total, m_tiles, n_tiles, steps, band = grid
    i = 0
    # loop over this program's tiles
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, pad, real, steps_t, m, n = locate_tile(t, grid, KIND)
        if END == "swiglu":
            row = pad
        # loop over the contraction: wait for a free stage, then fill it
        for k in range(steps_t):
            s = i % STAGES
            bar = full.index(s)
            free = empty.index(s)
            phase = (i // STAGES) & 1
            mbarrier.wait(free, phase ^ 1)
            mbarrier.expect(bar, (128 + BN) * 64 * 2)
            # the left operand: two buffers, one for each consumer
            for w in gl.static_range(2):
                if KIND == "tn":
                    a_at = [row + k * 64, m * 128 + 64 * w]
                else:
                    a_at = [row + 64 * w, k * 64]
                tma.async_copy_global_to_shared(a_desc, a_at, bar, a_bufs.index(2 * s + w))
            # the right operand
            if KIND == "tn":
                b_at = [pad + k * 64, n * BN]
            elif KIND == "nn":
                b_at = [expert * K + k * 64, n * BN]
            elif END == "swiglu":  # half of the tile's columns are gate, half up
                b_at = [expert * 2, n * (BN // 2), k * 64]
            else:
                b_at = [expert * N + n * BN, k * 64]
            b = b_bufs.index(s)
            if END == "swiglu":
                b = b.reshape([2, BN // 2, 64])
            tma.async_copy_global_to_shared(b_desc, b_at, bar, b)
            i += 1


@gluon.jit
def multiply_tiles(
    ring, hand, grid, out_ptr, M, N,
    HALF: gl.constexpr, KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 of a tile's 128 rows. They are handed to the epilogue once it has taken the previous tile's."""
    a_bufs, b_bufs, full, empty = ring
    tile, made, gone = hand
    tiles_M4, ends_E, pads_E, total, m_tiles, n_tiles, steps, band = grid
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    i = 0
    facts = locate_tile(gl.program_id(0), grid, KIND)
    # loop over this program's tiles
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, pad, real, steps_t, m, n = facts
        turn = t // gl.num_programs(0)
        # lookup of the next tile, in flight while this one is multiplied
        facts = locate_tile(t + gl.num_programs(0), grid, KIND)
        if KIND == "tn" or real > 64 * HALF:
            acc = gl.zeros([64, BN], gl.float32, layout)
            # main loop over the contraction; a stage is freed one step later, when its product is done
            for k in range(steps_t):
                step = i + k
                s = step % STAGES
                filled = full.index(s)
                phase = (step // STAGES) & 1
                mbarrier.wait(filled, phase)
                # the operands of this step, transposed as the contraction asks
                a = a_bufs.index(2 * s + HALF)
                b = b_bufs.index(s)
                if KIND == "tn":
                    a = a.permute((1, 0))
                if KIND == "nt":
                    b = b.permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
                # the product of the step before is done
                acc = warpgroup_mma_wait(1, deps=(acc,))
                has_previous = k > 0
                previous = (step + STAGES - 1) % STAGES
                mbarrier.arrive(empty.index(previous), pred=has_previous)
            # the last product
            acc = warpgroup_mma_wait(0, deps=(acc,))
            any_step = steps_t > 0
            last = (i + steps_t + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(last), pred=any_step)
            # the result: added to memory here, or rounded and handed over in shared memory
            if END == "add":
                first_row = m * 128 + 64 * HALF
                epilogue_add(out_ptr, acc, expert, first_row, n * BN, M, N, BN)
            else:
                mbarrier.wait(gone.index(HALF), turn & 1 ^ 1)
                tile.index(HALF).store(acc.to(gl.bfloat16))
                fence_async_shared()
                mbarrier.arrive(made.index(HALF))
        else:  # no real rows in this half: only free the stages
            for k in range(steps_t):
                step = i + k
                s = step % STAGES
                filled = full.index(s)
                phase = (step // STAGES) & 1
                mbarrier.wait(filled, phase)
                mbarrier.arrive(empty.index(s))
            if END != "add":
                mbarrier.wait(gone.index(HALF), turn & 1 ^ 1)
                mbarrier.arrive(made.index(HALF))
        i += steps_t


@gluon.jit
def run_epilogues(outs, hand, ahead, grid, N, rows, KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr):
    """The epilogue of a tile's two halves, while the consumers multiply the next tile."""
    tile, made, gone = hand
    tiles_M4, ends_E, pads_E, total, m_tiles, n_tiles, steps, band = grid
    last = 0 if END == "add" else total  # the consumers add these themselves
    # loop over this program's tiles
    for t in range(gl.program_id(0), last, gl.num_programs(0)):
        expert, row, pad, real, steps_t, m, n = locate_tile(t, grid, KIND)
        phase = t // gl.num_programs(0) & 1
        # where the tile goes: weight gradients to the expert's plane
        plane = 0
        if KIND == "tn":
            plane = expert
            row = m * 128
            real = 128
        # 64 rows at a time: wait until they are made, store them, free their place
        for half in range(2):
            bar = made.index(half)
            if END == "plain":
                epilogue_plain(outs, tile, bar, phase, half, plane, row, n, N, real, BN)
            elif END == "swiglu":
                epilogue_swiglu(outs, tile, bar, phase, half, row, n, N, real, BN)
            elif END == "dswiglu":
                epilogue_dswiglu(outs, tile, ahead, bar, phase, half, row, pad, n, N, real, rows, BN)
            tma.store_wait(0)
            mbarrier.arrive(gone.index(half))
            row += 64
            pad += 64
            real -= 64


@gluon.jit(do_not_specialize=["experts", "M", "K", "rows", "band"])
def expert_gemm(
    a_desc, b_desc, out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR, tiles_M4, count, ends_E, pads_E,
    experts, M, N, K, rows, band,
    KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A persistent program: tiles program_id, program_id + num_programs, ..."""
    # prologue: shared memory for operands, for a tile of results, and for gate and up fetched ahead
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 64], a_desc.layout)
    b_shape: gl.constexpr = [BN, 64] if KIND == "nt" else [64, BN]
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, gl.bfloat16)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, b_shape[0], b_shape[1]], b_layout)
    tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BN], a_desc.layout)
    row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ahead = gl.allocate_shared_memory(gl.bfloat16, [8, 16, 64], row_major)
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
    N = N // 8 * 8  # tells the compiler that it is a multiple of 8, for loads of 16 bytes
    n_tiles = gl.cdiv(N, BN)
    if KIND == "tn":
        m_tiles = gl.cdiv(M, 128)
        total = experts * m_tiles * n_tiles
    else:
        m_tiles = gl.load(count)
        total = m_tiles * n_tiles
    steps = gl.cdiv(K, 64)
    ring = (a_bufs, b_bufs, full, empty)
    hand = (tile, made, gone)
    outs = (out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR)
    grid = (tiles_M4, ends_E, pads_E, total, m_tiles, n_tiles, steps, band)
    # two consumer warpgroups, one producer warp, two epilogue warps
    gl.warp_specialize(
        [
            (multiply_tiles, (ring, hand, grid, out_ptr, M, N, 0, KIND, END, BN, STAGES)),
            (multiply_tiles, (ring, hand, grid, out_ptr, M, N, 1, KIND, END, BN, STAGES)),
            (fetch_operands, ((a_desc, b_desc), ring, grid, N, K, KIND, END, BN, STAGES)),
            (run_epilogues, (outs, hand, ahead, grid, N, rows, KIND, END, BN)),
        ],
        [4, 1, 2],
        [192, 120, 120],
    )
