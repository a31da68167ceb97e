"""Backward of causal attention for Hopper, in Gluon: scores are computed once and each sum has one owner, so no product
is done twice and two runs agree to the bit.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dK = dS^T Q    dV = P^T dO    dQ = dS K

`attention_dkdv_hopper`: a program has 128 keys, loops over all queries from them on and accumulates dK and dV in
registers. It computes S^T, whose rows are keys: P^T and dS^T are then left operands as they lie in the registers. It
also stores dS^T. `attention_dq_hopper` reads dS^T and is a plain GEMM, dQ = dS K. (Without storing it, either scores
are computed again for dQ, seven products instead of five, or dQ is accumulated by several programs.)

In both, one warp is the producer (TMA loads), and two warpgroups, or one, are consumers (wgmma). dS^T is stored in
tiles of 128 keys by 64 queries: the tiles of a head's first 128 keys, then those of the next, as far as queries see
them.

B sequences, S positions, H query heads, D head width; T tiles of 64 queries and N = T / 2 blocks of 128 keys, the last
of which may reach beyond S: loads give zeros there, and nothing is stored. A unit is a key/value head of a sequence
with the GROUP query heads it serves.
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

from moefold.kernels.hopper import banded_tile, split_columns


@gluon.jit
def ds_tile_first_row(head, n, t, T):
    """The first row of tile (n, t) of a head's dS^T. Key block n is seen by query tiles from 2 n on."""
    N = T // 2
    tiles_per_head = N * T - N * (N - 1)
    return (head * tiles_per_head + n * T - n * (n - 1) + t - 2 * n) * 128


@gluon.jit
def fetch_queries(descs, statistics, bufs, bars, at, D: gl.constexpr, STAGES: gl.constexpr):
    """The producer: keys and values once; then queries, output gradients and statistics, tile by tile, head by head."""
    q_desc, k_desc, v_desc, dy_desc = descs
    q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs = bufs
    full, empty, keys_full = bars
    b, g, n, local, T, H, GROUP = at
    # prologue: keys and values of this program
    mbarrier.expect(keys_full, 4 * 64 * D * 2)
    for w in gl.static_range(2):
        here = [b, n * 128 + 64 * w, g * D]
        tma.async_copy_global_to_shared(k_desc, here, keys_full, k_bufs.index(w).reshape([1, 64, D]))
        tma.async_copy_global_to_shared(v_desc, here, keys_full, v_bufs.index(w).reshape([1, 64, D]))
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    tiles = T - 2 * n
    # main loop over query heads and tiles: wait for a free stage, then fill it
    for i in range(GROUP * tiles):
        s = i % STAGES
        h = g * GROUP + i // tiles
        t = 2 * n + i % tiles
        bar = full.index(s)
        first = ((b * H + h) * T + t).to(gl.int64) * 128
        stats = gl.load(statistics + first + gl.arange(0, 128, lanes))
        mbarrier.wait(empty.index(s), (i // STAGES) & 1 ^ 1)
        mbarrier.expect(bar, 2 * 64 * D * 2)
        tma.async_copy_global_to_shared(q_desc, [b, t * 64, h * D], bar, q_bufs.index(s).reshape([1, 64, D]))
        tma.async_copy_global_to_shared(dy_desc, [b, t * 64, h * D], bar, dy_bufs.index(s).reshape([1, 64, D]))
        stat_bufs.index(s).store(stats)
        gl.thread_barrier()
        mbarrier.arrive(bar)


@gluon.jit
def initial_scores(stat_buf, t, W: gl.constexpr, layout: gl.constexpr):
    """The accumulator that S^T starts from: minus lse, or minus infinity where a query does not see a key."""
    start = stat_buf.slice(0, 64).load(gl.SliceLayout(0, layout))[None, :].broadcast_to(64, 64)
    if t <= W:
        keys = gl.arange(0, 64, gl.SliceLayout(1, layout)) + 64 * W
        queries = gl.arange(0, 64, gl.SliceLayout(0, layout)) + 64 * t
        start = gl.where(queries[None, :] >= keys[:, None], start, float("-inf"))
    return start


@gluon.jit
def accumulate_dkdv(outs, bufs, ds_bufs, bars, at, scale, W: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """A consumer: gradients of 64 keys and values, and their dS^T. W: which half of the program's 128 keys."""
    dk_desc, dv_desc, ds_desc = outs
    q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs = bufs
    full, empty, keys_full = bars
    b, g, n, local, T, H, GROUP = at
    kind: gl.constexpr = q_bufs.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_keys = gl.zeros([64, D], gl.float32, layout)
    of_values = gl.zeros([64, D], gl.float32, layout)
    tiles = T - 2 * n
    mbarrier.wait(keys_full, 0)
    # main loop over query heads and tiles
    for i in range(GROUP * tiles):
        s = i % STAGES
        t = i % tiles
        q = q_bufs.index(s)
        dy = dy_bufs.index(s)
        stat = stat_bufs.index(s)
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        # S^T = K Q^T - lse and dP^T = V dO^T - delta
        scores = initial_scores(stat, t, W, square)
        scores = warpgroup_mma(k_bufs.index(W), q.permute((1, 0)), scores, is_async=True)
        dp = stat.slice(64, 64).load(gl.SliceLayout(0, square))[None, :].broadcast_to(64, 64)
        dp = warpgroup_mma(v_bufs.index(W), dy.permute((1, 0)), dp, is_async=True)
        # P^T, and dV += P^T dO
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * (scale * 1.4426950408889634))
        p_left = gl.convert_layout(p.to(kind), left, assert_trivial=True)
        of_values = warpgroup_mma(p_left, dy, of_values, is_async=True)
        # dS^T, and dK += dS^T Q
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(kind)
        ds_left = gl.convert_layout(ds, left, assert_trivial=True)
        of_keys = warpgroup_mma(ds_left, q, of_keys, is_async=True)
        # store dS^T by TMA, from two buffers in turn
        ds_buf = ds_bufs.index(2 * W + i % 2)
        tma.store_wait(1)
        ds_buf.store(ds)
        fence_async_shared()
        here = ds_tile_first_row(local * GROUP + i // tiles, n, 2 * n + t, T) + 64 * W
        tma.async_copy_shared_to_global(ds_desc, [here, 0], ds_buf)
        # the stage is free once both products have read it
        of_values, of_keys, p_left, ds_left = warpgroup_mma_wait(0, deps=(of_values, of_keys, p_left, ds_left))
        mbarrier.arrive(empty.index(s))
    # epilogue: dK and dV leave through the buffers of K and V
    k_bufs.index(W).store((of_keys * scale).to(kind))
    v_bufs.index(W).store(of_values.to(kind))
    fence_async_shared()
    here = [b, n * 128 + 64 * W, g * D]
    tma.async_copy_shared_to_global(dk_desc, here, k_bufs.index(W).reshape([1, 64, D]))
    tma.async_copy_shared_to_global(dv_desc, here, v_bufs.index(W).reshape([1, 64, D]))
    tma.store_wait(0)


@gluon.jit
def attention_dkdv_hopper(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, ds_desc, statistics,
    unit, units, T, H, GROUP, band, scale, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK, dV and dS^T of so many units from `unit` on."""
    # prologue: shared memory and barriers
    kind: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], kind)
    q_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    dy_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    k_bufs = gl.allocate_shared_memory(kind, [2, 64, D], tile)
    v_bufs = gl.allocate_shared_memory(kind, [2, 64, D], tile)
    ds_bufs = gl.allocate_shared_memory(kind, [4, 64, 64], ds_desc.layout)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)  # TMA's arrival, and that of the statistics
        mbarrier.init(empty.index(s), count=2)
    mbarrier.init(keys_full, count=1)
    fence_async_shared()

    # this program's unit and key block
    local, n = banded_tile(gl.program_id(0), units, T // 2, band)
    b, g = (unit + local) // (H // GROUP), (unit + local) % (H // GROUP)
    at = (b, g, n, local, T, H, GROUP)
    outs = (dk_desc, dv_desc, ds_desc)
    bufs = (q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs)
    bars = (full, empty, keys_full)
    # two consumer warpgroups and one producer warp
    gl.warp_specialize(
        [
            (accumulate_dkdv, (outs, bufs, ds_bufs, bars, at, scale, 0, D, STAGES)),
            (accumulate_dkdv, (outs, bufs, ds_bufs, bars, at, scale, 1, D, STAGES)),
            (fetch_queries, ((q_desc, k_desc, v_desc, dy_desc), statistics, bufs, bars, at, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def fetch_keys_and_ds(k_desc, ds_desc, bufs, bars, at, D: gl.constexpr, STAGES: gl.constexpr):
    """The producer: 64 keys at a time, and their dS^T for two query tiles."""
    k_bufs, ds_bufs = bufs
    full, empty = bars
    b, g, h, m, local, T = at
    for i in range(2 * (m + 1)):
        s = i % STAGES
        bar = full.index(s)
        mbarrier.wait(empty.index(s), (i // STAGES) & 1 ^ 1)
        mbarrier.expect(bar, (D + 2 * 64) * 64 * 2)
        tma.async_copy_global_to_shared(k_desc, [b, i * 64, g * D], bar, k_bufs.index(s).reshape([1, 64, D]))
        for c in gl.static_range(2):
            row = ds_tile_first_row(local, i // 2, 2 * m + c, T) + (i % 2) * 64
            tma.async_copy_global_to_shared(ds_desc, [row, 0], bar, ds_bufs.index(2 * s + c))


@gluon.jit
def accumulate_dq(dq_desc, bufs, bars, at, scale, D: gl.constexpr, STAGES: gl.constexpr):
    """The consumer: the gradient of 128 queries, two tiles."""
    k_bufs, ds_bufs = bufs
    full, empty = bars
    b, g, h, m, local, T = at
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    one = gl.zeros([64, D], gl.float32, layout)
    two = gl.zeros([64, D], gl.float32, layout)
    # main loop over keys, 64 at a time; a stage is freed one step later, when its products are done
    for i in range(2 * (m + 1)):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        one = warpgroup_mma(ds_bufs.index(2 * s).permute((1, 0)), k_bufs.index(s), one, is_async=True)
        two = warpgroup_mma(ds_bufs.index(2 * s + 1).permute((1, 0)), k_bufs.index(s), two, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    # epilogue: dQ leaves through the buffers of dS^T, to which no load is in flight any more
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    store_dq_tile(dq_desc, ds_bufs, one * scale, [b, 128 * m, h * D], 0, D)
    store_dq_tile(dq_desc, ds_bufs, two * scale, [b, 128 * m + 64, h * D], 2, D)
    tma.store_wait(0)


@gluon.jit
def store_dq_tile(dq_desc, bufs, x, at, FIRST: gl.constexpr, D: gl.constexpr):
    """Store 64 queries' gradient by TMA through one buffer, or two, from FIRST on."""
    x = x.to(bufs.dtype)
    if D == 128:
        x, right = split_columns(x, 64, D)
        bufs.index(FIRST + 1).store(right)
    bufs.index(FIRST).store(x)
    fence_async_shared()
    for c in gl.static_range(D // 64):
        here = [at[0], at[1], at[2] + 64 * c]
        tma.async_copy_shared_to_global(dq_desc, here, bufs.index(FIRST + c).reshape([1, 64, 64]))


@gluon.jit
def attention_dq_hopper(
    k_desc, ds_desc, dq_desc, unit, heads, T, H, GROUP, band, scale, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """dQ of so many heads, from the first of `unit` on: 128 queries a program, those that see most keys first. Two
    programs fit on a multiprocessor: one is in its prologue or epilogue while the other multiplies."""
    # prologue: shared memory and barriers
    kind: gl.constexpr = k_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], kind)
    k_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    ds_bufs = gl.allocate_shared_memory(kind, [2 * STAGES, 64, 64], ds_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()

    # this program's head and query block
    local, rank = banded_tile(gl.program_id(0), heads, T // 2, band)
    head = unit * GROUP + local
    b, h = head // H, head % H
    at = (b, h // GROUP, h, T // 2 - 1 - rank, local, T)
    bufs, bars = (k_bufs, ds_bufs), (full, empty)
    # one consumer warpgroup and one producer warp
    gl.warp_specialize(
        [
            (accumulate_dq, (dq_desc, bufs, bars, at, scale, D, STAGES)),
            (fetch_keys_and_ds, (k_desc, ds_desc, bufs, bars, at, D, STAGES)),
        ],
        [1],
        [24],
    )
