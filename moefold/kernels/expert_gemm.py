"""The grouped GEMMs of an expert MLP for Hopper, in Gluon: one persistent kernel, three contractions, three epilogues.

Rows lie sorted by expert, each expert's padded to a multiple of 64 (HALF), so that no tile crosses into another expert.
One warp fetches (TMA, running ahead over tile boundaries); two warpgroups multiply, each 64 rows of a 128 x 256 tile.

    contraction   out                        a                  b                   sum over
    "nt"          rows x outer               rows (P, K)        weights (E, N, K)   K
    "nn"          rows x inner               rows (P, K)        weights (E, K, N)   K
    "tn"          (expert, outer) x inner    rows (P, M)        rows (P, N)         the expert's rows

`tiles_M4` says for each tile of 128 rows: expert, first padded row, first row without padding, rows that are real.
Everything about the routing is read on the device; the grid depends on shapes alone. No atomics: bits repeat.
"""

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


@gluon.jit
def place(t, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Tile t of a grid walked in bands of GROUP rows of tiles, so that tiles in flight share their operands in L2."""
    band = t // (GROUP * n_tiles)
    inside = t % (GROUP * n_tiles)
    height = gl.minimum(m_tiles - band * GROUP, GROUP)
    return band * GROUP + inside % height, inside // height


@gluon.jit
def work(t, m_tiles, n_tiles, tiles_M4, ends_e, steps, KIND: gl.constexpr, GROUP: gl.constexpr):
    """Of tile t: expert, first padded row, first plain row, real rows, steps of the contraction, and its place (m, n)."""
    if KIND == "tn":
        expert = t // (m_tiles * n_tiles)
        m, n = place(t % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP)
        row = gl.load(ends_e + expert - 1, mask=expert > 0, other=0)
        steps = (gl.load(ends_e + expert) - row) // 64
        plain = 0
        real = 128
    else:
        m, n = place(t, m_tiles, n_tiles, GROUP)
        expert = gl.load(tiles_M4 + 4 * m)
        row = gl.load(tiles_M4 + 4 * m + 1)
        plain = gl.load(tiles_M4 + 4 * m + 2)
        real = gl.load(tiles_M4 + 4 * m + 3)
    return expert, row, plain, real, steps, m, n


@gluon.jit
def fetch(
    descs, bufs, grid, N, K,
    KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The producer: keeps STAGES steps of operands under way, whatever tile they belong to."""
    a_desc, b_desc, h_desc = descs
    a_bufs, b_bufs, c_bufs, full, empty = bufs
    tiles_M4, ends_e, total, m_tiles, n_tiles, steps = grid
    i = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, plain, real, steps_t, m, n = work(t, m_tiles, n_tiles, tiles_M4, ends_e, steps, KIND, GROUP)
        for k in range(steps_t):
            s = i % STAGES
            bar = full.index(s)
            mbarrier.wait(empty.index(s), (i // STAGES) & 1 ^ 1)
            mbarrier.expect(bar, (128 + BN) * 64 * 2)
            if KIND == "tn":
                tma.async_copy_global_to_shared(a_desc, [row + k * 64, m * 128], bar, a_bufs.index(2 * s))
                tma.async_copy_global_to_shared(a_desc, [row + k * 64, m * 128 + 64], bar, a_bufs.index(2 * s + 1))
                tma.async_copy_global_to_shared(b_desc, [row + k * 64, n * BN], bar, b_bufs.index(s))
            else:
                tma.async_copy_global_to_shared(a_desc, [row, k * 64], bar, a_bufs.index(2 * s))
                tma.async_copy_global_to_shared(a_desc, [row + 64, k * 64], bar, a_bufs.index(2 * s + 1))
                if KIND == "nn":
                    tma.async_copy_global_to_shared(b_desc, [expert * K + k * 64, n * BN], bar, b_bufs.index(s))
                elif END == "swiglu":  # half a tile of gate columns, half of up columns
                    b = b_bufs.index(s).reshape([2, BN // 2, 64])
                    tma.async_copy_global_to_shared(b_desc, [expert * 2, n * (BN // 2), k * 64], bar, b)
                else:
                    tma.async_copy_global_to_shared(b_desc, [expert * N + n * BN, k * 64], bar, b_bufs.index(s))
            i += 1
        if END == "dswiglu":  # the pre-activation of this tile comes through the same ring, 64 columns a step
            for c in gl.static_range(BN // 64):
                s = i % STAGES
                bar = full.index(s)
                mbarrier.wait(empty.index(s), (i // STAGES) & 1 ^ 1)
                mbarrier.expect(bar, 4 * 64 * 64 * 2)
                b = b_bufs.index(s)._reinterpret(gl.bfloat16, [BN // 64, 64, 64], h_desc.layout)
                column = n * BN + c * 64
                tma.async_copy_global_to_shared(h_desc, [plain, column], bar, a_bufs.index(2 * s))
                tma.async_copy_global_to_shared(h_desc, [plain + 64, column], bar, a_bufs.index(2 * s + 1))
                tma.async_copy_global_to_shared(h_desc, [plain, N + column], bar, b.index(0))
                tma.async_copy_global_to_shared(h_desc, [plain + 64, N + column], bar, b.index(1))
                i += 1


@gluon.jit
def halves(x_MN, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of the columns, without moving anything between threads."""
    return x_MN.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def sigmoid(x):
    """(1 + tanh(x / 2)) / 2: one instruction of the special unit where exp and a division would take two."""
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def put(out_desc, row, column, buf, value):
    """Write a tile behind the caller's back; `buf` must not be written again before a store_wait."""
    buf.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], buf)


@gluon.jit
def put_real(out_ptr, row, column, width, real, value_MN, M: gl.constexpr, N: gl.constexpr):
    """Write only the `real` first rows of a tile."""
    layout: gl.constexpr = value_MN.type.layout
    r = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    at = out_ptr + (row + r).to(gl.int64)[:, None] * width + (column + c)[None, :]
    gl.store(at, value_MN, mask=(r < real)[:, None])


@gluon.jit
def multiply(
    outs, bufs, grid, M, N, rows,
    HALF: gl.constexpr, KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 of a tile's 128 rows, and their epilogue."""
    out_desc, out2_desc, out2_ptr, gate_P, dot_NP = outs
    a_bufs, b_bufs, c_bufs, full, empty = bufs
    tiles_M4, ends_e, total, m_tiles, n_tiles, steps = grid
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    first: gl.constexpr = 64 * HALF
    i = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, plain, real, steps_t, m, n = work(t, m_tiles, n_tiles, tiles_M4, ends_e, steps, KIND, GROUP)
        if real > first:
            acc = gl.zeros([64, BN], gl.float32, layout)
            for k in range(steps_t):
                s = (i + k) % STAGES
                mbarrier.wait(full.index(s), ((i + k) // STAGES) & 1)
                a = a_bufs.index(2 * s + HALF)
                b = b_bufs.index(s)
                if KIND == "tn":
                    a = a.permute((1, 0))
                if KIND == "nt":
                    b = b.permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((i + k + STAGES - 1) % STAGES), pred=k > 0)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((i + steps_t + STAGES - 1) % STAGES), pred=steps_t > 0)
            i += steps_t

            if END == "plain":
                row_out = row + first
                if KIND == "tn":
                    row_out = expert * M + m * 128 + first
                tma.store_wait(0)
                put(out_desc, row_out, n * BN, c_bufs.index(HALF), acc.to(gl.bfloat16))
            elif END == "swiglu":
                gate, up = halves(acc, 64, BN)
                column = n * (BN // 2)
                gate_r = gl.load(gate_P + row + first + gl.arange(0, 64, layout=gl.SliceLayout(1, gate.type.layout)))
                tma.store_wait(0)
                if real >= first + 64:
                    put(out2_desc, plain + first, column, c_bufs.index(2 * HALF), gate.to(gl.bfloat16))
                    put(out2_desc, plain + first, N // 2 + column, c_bufs.index(2 * HALF + 1), up.to(gl.bfloat16))
                else:
                    put_real(out2_ptr, plain + first, column, N, real - first, gate.to(gl.bfloat16), 64, BN // 2)
                    put_real(
                        out2_ptr, plain + first, N // 2 + column, N, real - first, up.to(gl.bfloat16), 64, BN // 2
                    )
                act = gate * sigmoid(gate) * up * gate_r[:, None]
                tma.store_wait(1)
                put(out_desc, row + first, column, c_bufs.index(2 * HALF), act.to(gl.bfloat16))
            else:
                left, right = halves(acc, 64, BN)
                c0, c1 = halves(left, 64, BN // 2)
                c2, c3 = halves(right, 64, BN // 2)
                chunks = (c0, c1, c2, c3)
                small: gl.constexpr = c0.type.layout
                r = gl.arange(0, 64, layout=gl.SliceLayout(1, small))
                gate_r = gl.load(gate_P + row + first + r)
                dot_r = gl.zeros([64], gl.float32, gl.SliceLayout(1, small))
                for c in gl.static_range(BN // 64):
                    s = i % STAGES
                    mbarrier.wait(full.index(s), (i // STAGES) & 1)
                    h = b_bufs.index(s)._reinterpret(gl.bfloat16, [BN // 64, 64, 64], c_bufs.type.layout)
                    gate = a_bufs.index(2 * s + HALF).load(small).to(gl.float32)
                    up = h.index(HALF).load(small).to(gl.float32)
                    mbarrier.arrive(empty.index(s))
                    d = chunks[c]
                    sig = sigmoid(gate)
                    silu = gate * sig
                    dot_r += gl.sum(d * silu * up, axis=1)
                    d *= gate_r[:, None]
                    column = n * BN + c * 64
                    tma.store_wait(0)
                    put(out2_desc, row + first, column, c_bufs.index(4 * HALF), (silu * up * gate_r[:, None]).to(gl.bfloat16))
                    put(out_desc, row + first, column, c_bufs.index(4 * HALF + 1), (d * up * (sig + silu * (1 - sig))).to(gl.bfloat16))
                    put(out_desc, row + first, N + column, c_bufs.index(4 * HALF + 2), (d * silu).to(gl.bfloat16))
                    i += 1
                gl.store(dot_NP + n * rows + row + first + r, dot_r)
        else:  # nothing here for this half: only hand the buffers back
            extra: gl.constexpr = BN // 64 if END == "dswiglu" else 0
            for k in range(steps_t + extra):
                mbarrier.wait(full.index((i + k) % STAGES), ((i + k) // STAGES) & 1)
                mbarrier.arrive(empty.index((i + k) % STAGES))
            i += steps_t + extra
    tma.store_wait(0)


@gluon.jit
def expert_gemm(
    a_desc, b_desc, h_desc, out_desc, out2_desc, out2_ptr, gate_P, dot_NP, tiles_M4, count_ptr, ends_e, experts, M, N, K,
    rows,
    KIND: gl.constexpr, END: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 64], a_desc.layout)
    b_shape: gl.constexpr = [BN, 64] if KIND == "nt" else [64, BN]
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, gl.bfloat16)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, b_shape[0], b_shape[1]], b_layout)
    c_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [128 * BN // (64 * out_desc.block_shape[1]), 64, out_desc.block_shape[1]], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()

    n_tiles = gl.cdiv(N, BN)
    if KIND == "tn":
        m_tiles = gl.cdiv(M, 128)
        total = experts * m_tiles * n_tiles
    else:
        m_tiles = gl.load(count_ptr)
        total = m_tiles * n_tiles
    steps = gl.cdiv(K, 64)
    descs = (a_desc, b_desc, h_desc)
    outs = (out_desc, out2_desc, out2_ptr, gate_P, dot_NP)
    bufs = (a_bufs, b_bufs, c_bufs, full, empty)
    grid = (tiles_M4, ends_e, total, m_tiles, n_tiles, steps)
    gl.warp_specialize(
        [
            (multiply, (outs, bufs, grid, M, N, rows, 0, KIND, END, BN, STAGES, GROUP)),
            (multiply, (outs, bufs, grid, M, N, rows, 1, KIND, END, BN, STAGES, GROUP)),
            (fetch, (descs, bufs, grid, N, K, KIND, END, BN, STAGES, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )
