"""Backward of attention for Hopper, in Gluon: scores are computed once and each sum has one owner, so no product is
done twice and two runs agree to the bit. Attention is causal or, for blocks of ring attention, over all keys.

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

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # the name before Triton 3.7, and since


@gluon.jit
def ds_tile_first_row(head, n, t, T, CAUSAL: gl.constexpr):
    """The first row of tile (n, t) of a head's dS^T. Key block n is seen by all query tiles or, if causal, by those
    from 2 n on."""
    N = T // 2
    tiles_per_head = N * T
    tile = n * T + t
    if CAUSAL:
        tiles_per_head -= N * (N - 1)
        tile -= n * (n + 1)
    return (head * tiles_per_head + tile) * 128


@gluon.jit
def fetch_positions(desc, at, bar, buf, WIDTH: gl.constexpr):
    """Start the load of 64 positions of one head."""
    tma.async_copy_global_to_shared(desc, at, bar, buf.reshape([1, 64, WIDTH]))


@gluon.jit
def send_positions(desc, at, buf, WIDTH: gl.constexpr):
    """Start the store of 64 positions of one head."""
    tma.async_copy_shared_to_global(desc, at, buf.reshape([1, 64, WIDTH]))


@gluon.jit
def broadcast_to_rows(x, layout: gl.constexpr):
    """64 numbers in shared memory as every row of a square tile."""
    row = x.load(gl.SliceLayout(0, layout))
    return row[None, :].broadcast_to(64, 64)


@gluon.jit
def fetch_queries(descs, statistics, bufs, bars, at, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """The producer: keys and values once; then queries, output gradients and statistics, tile by tile, head by head."""
    q_desc, k_desc, v_desc, dy_desc = descs
    q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs = bufs
    full, empty, keys_full = bars
    b, g, n, local, T, H, GROUP = at
    # prologue: keys and values of this program
    mbarrier.expect(keys_full, 4 * 64 * D * 2)
    for w in gl.static_range(2):
        here = [b, n * 128 + 64 * w, g * D]
        fetch_positions(k_desc, here, keys_full, k_bufs.index(w), D)
        fetch_positions(v_desc, here, keys_full, v_bufs.index(w), D)
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    first_tile = 2 * n if CAUSAL else 0
    tiles = T - first_tile
    # main loop over query heads and tiles: wait for a free stage, then fill it
    for i in range(GROUP * tiles):
        s = i % STAGES
        h = g * GROUP + i // tiles
        t = first_tile + i % tiles
        bar = full.index(s)
        # statistics of this tile, read early
        tile = (b * H + h) * T + t
        first = tile.to(gl.int64) * 128
        stats = gl.load(statistics + first + gl.arange(0, 128, lanes))
        # queries and output gradients by TMA
        free = empty.index(s)
        phase = (i // STAGES) & 1
        mbarrier.wait(free, phase ^ 1)
        mbarrier.expect(bar, 2 * 64 * D * 2)
        here = [b, t * 64, h * D]
        fetch_positions(q_desc, here, bar, q_bufs.index(s), D)
        fetch_positions(dy_desc, here, bar, dy_bufs.index(s), D)
        # statistics by this warp, whose arrival is the second
        stat_bufs.index(s).store(stats)
        thread_barrier()
        mbarrier.arrive(bar)


@gluon.jit
def initial_scores(stat_buf, t, W: gl.constexpr, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """The accumulator that S^T starts from: minus lse, or minus infinity where a query does not see a key."""
    start = broadcast_to_rows(stat_buf.slice(0, 64), layout)
    if CAUSAL and t <= W:  # the tile lies on the diagonal, or above it
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        keys = gl.arange(0, 64, rows) + 64 * W
        columns: gl.constexpr = gl.SliceLayout(0, layout)
        queries = gl.arange(0, 64, columns) + 64 * t
        visible = queries[None, :] >= keys[:, None]
        start = gl.where(visible, start, float("-inf"))
    return start


@gluon.jit
def accumulate_dkdv(
    outs, bufs, ds_bufs, bars, at, scale, W: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """A consumer: gradients of 64 keys and values, and their dS^T. W: which half of the program's 128 keys."""
    dk_desc, dv_desc, ds_desc = outs
    q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs = bufs
    full, empty, keys_full = bars
    b, g, n, local, T, H, GROUP = at
    # prologue: layouts and accumulators
    kind: gl.constexpr = q_bufs.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_keys = gl.zeros([64, D], gl.float32, layout)
    of_values = gl.zeros([64, D], gl.float32, layout)
    first_tile = 2 * n if CAUSAL else 0
    tiles = T - first_tile
    mbarrier.wait(keys_full, 0)
    # main loop over query heads and tiles
    for i in range(GROUP * tiles):
        s = i % STAGES
        t = i % tiles
        q = q_bufs.index(s)
        dy = dy_bufs.index(s)
        stat = stat_bufs.index(s)
        filled = full.index(s)
        phase = (i // STAGES) & 1
        mbarrier.wait(filled, phase)
        # S^T = K Q^T - lse and dP^T = V dO^T - delta
        scores = initial_scores(stat, t, W, square, CAUSAL)
        keys = k_bufs.index(W)
        q_columns = q.permute((1, 0))
        scores = warpgroup_mma(keys, q_columns, scores, is_async=True)
        dp = broadcast_to_rows(stat.slice(64, 64), square)
        values = v_bufs.index(W)
        dy_columns = dy.permute((1, 0))
        dp = warpgroup_mma(values, dy_columns, dp, is_async=True)
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
        head = local * GROUP + i // tiles
        row = ds_tile_first_row(head, n, first_tile + t, T, CAUSAL) + 64 * W
        tma.async_copy_shared_to_global(ds_desc, [row, 0], ds_buf)
        # the stage is free once both products have read it
        of_values, of_keys, p_left, ds_left = warpgroup_mma_wait(0, deps=(of_values, of_keys, p_left, ds_left))
        mbarrier.arrive(empty.index(s))
    # epilogue: dK and dV leave through the buffers of K and V
    k_buf = k_bufs.index(W)
    dk = of_keys * scale
    k_buf.store(dk.to(kind))
    v_buf = v_bufs.index(W)
    v_buf.store(of_values.to(kind))
    fence_async_shared()
    here = [b, n * 128 + 64 * W, g * D]
    send_positions(dk_desc, here, k_buf, D)
    send_positions(dv_desc, here, v_buf, D)
    tma.store_wait(0)


@gluon.jit
def attention_dkdv_hopper(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, ds_desc, statistics,
    unit, units, T, H, GROUP, band, scale, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK, dV and dS^T of so many units from `unit` on."""
    # prologue: shared memory
    kind: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], kind)
    q_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    dy_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    k_bufs = gl.allocate_shared_memory(kind, [2, 64, D], tile)
    v_bufs = gl.allocate_shared_memory(kind, [2, 64, D], tile)
    ds_bufs = gl.allocate_shared_memory(kind, [4, 64, 64], ds_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], plain)
    # barriers
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)  # TMA's arrival, and that of the statistics
        mbarrier.init(empty.index(s), count=2)
    mbarrier.init(keys_full, count=1)
    fence_async_shared()

    # this program's unit and key block
    local, n = banded_tile(gl.program_id(0), units, T // 2, band)
    kv_head = unit + local
    kv_heads = H // GROUP
    b = kv_head // kv_heads
    g = kv_head % kv_heads
    at = (b, g, n, local, T, H, GROUP)
    outs = (dk_desc, dv_desc, ds_desc)
    bufs = (q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs)
    bars = (full, empty, keys_full)
    inputs = (q_desc, k_desc, v_desc, dy_desc)
    # two consumer warpgroups and one producer warp
    gl.warp_specialize(
        [
            (accumulate_dkdv, (outs, bufs, ds_bufs, bars, at, scale, 0, D, STAGES, CAUSAL)),
            (accumulate_dkdv, (outs, bufs, ds_bufs, bars, at, scale, 1, D, STAGES, CAUSAL)),
            (fetch_queries, (inputs, statistics, bufs, bars, at, D, STAGES, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def fetch_keys_and_ds(k_desc, ds_desc, bufs, bars, at, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """The producer: 64 keys at a time, and their dS^T for two query tiles."""
    k_bufs, ds_bufs = bufs
    full, empty = bars
    b, g, h, m, key_blocks, local, T = at
    # main loop over keys, 64 at a time: wait for a free stage, then fill it
    for i in range(2 * key_blocks):
        s = i % STAGES
        bar = full.index(s)
        free = empty.index(s)
        phase = (i // STAGES) & 1
        mbarrier.wait(free, phase ^ 1)
        mbarrier.expect(bar, (D + 2 * 64) * 64 * 2)
        here = [b, i * 64, g * D]
        fetch_positions(k_desc, here, bar, k_bufs.index(s), D)
        for c in gl.static_range(2):
            tile_row = ds_tile_first_row(local, i // 2, 2 * m + c, T, CAUSAL)
            row = tile_row + (i % 2) * 64
            ds_buf = ds_bufs.index(2 * s + c)
            tma.async_copy_global_to_shared(ds_desc, [row, 0], bar, ds_buf)


@gluon.jit
def accumulate_dq(dq_desc, bufs, bars, at, scale, D: gl.constexpr, STAGES: gl.constexpr):
    """The consumer: the gradient of 128 queries, two tiles."""
    k_bufs, ds_bufs = bufs
    full, empty = bars
    b, g, h, m, key_blocks, local, T = at
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    one = gl.zeros([64, D], gl.float32, layout)
    two = gl.zeros([64, D], gl.float32, layout)
    # main loop over keys, 64 at a time; a stage is freed one step later, when its products are done
    for i in range(2 * key_blocks):
        s = i % STAGES
        filled = full.index(s)
        phase = (i // STAGES) & 1
        mbarrier.wait(filled, phase)
        # dQ += dS K, for both tiles
        ds_one = ds_bufs.index(2 * s).permute((1, 0))
        one = warpgroup_mma(ds_one, k_bufs.index(s), one, is_async=True)
        ds_two = ds_bufs.index(2 * s + 1).permute((1, 0))
        two = warpgroup_mma(ds_two, k_bufs.index(s), two, is_async=True)
        # the products of the step before are done
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        has_previous = i > 0
        previous = (i + STAGES - 1) % STAGES
        mbarrier.arrive(empty.index(previous), pred=has_previous)
    # epilogue: dQ leaves through the buffers of dS^T, to which no load is in flight any more
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    dq_one = one * scale
    here = [b, 128 * m, h * D]
    store_dq_tile(dq_desc, ds_bufs, dq_one, here, 0, D)
    dq_two = two * scale
    here = [b, 128 * m + 64, h * D]
    store_dq_tile(dq_desc, ds_bufs, dq_two, here, 2, D)
    tma.store_wait(0)


@gluon.jit
def store_dq_tile(dq_desc, bufs, x, at, FIRST: gl.constexpr, D: gl.constexpr):
    """Store 64 queries' gradient by TMA through one buffer, or two, from FIRST on."""
    x = x.to(bufs.dtype)
    # to shared memory, 64 columns to a buffer
    if D == 128:
        x, right = split_columns(x, 64, D)
        bufs.index(FIRST + 1).store(right)
    bufs.index(FIRST).store(x)
    fence_async_shared()
    # from there to memory
    for c in gl.static_range(D // 64):
        here = [at[0], at[1], at[2] + 64 * c]
        send_positions(dq_desc, here, bufs.index(FIRST + c), 64)


@gluon.jit
def attention_dq_hopper(
    k_desc, ds_desc, dq_desc, unit, heads, T, H, GROUP, band, scale, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """dQ of so many heads, from the first of `unit` on: 128 queries a program, those that see most keys first. Two
    programs fit on a multiprocessor: one is in its prologue or epilogue while the other multiplies."""
    # prologue: shared memory
    kind: gl.constexpr = k_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], kind)
    k_bufs = gl.allocate_shared_memory(kind, [STAGES, 64, D], tile)
    ds_bufs = gl.allocate_shared_memory(kind, [2 * STAGES, 64, 64], ds_desc.layout)
    # barriers
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()

    # this program's head and query block
    local, rank = banded_tile(gl.program_id(0), heads, T // 2, band)
    head = unit * GROUP + local
    b = head // H
    h = head % H
    g = h // GROUP
    m = T // 2 - 1 - rank
    key_blocks = m + 1 if CAUSAL else T // 2
    at = (b, g, h, m, key_blocks, local, T)
    bufs = (k_bufs, ds_bufs)
    bars = (full, empty)
    # one consumer warpgroup and one producer warp
    gl.warp_specialize(
        [
            (accumulate_dq, (dq_desc, bufs, bars, at, scale, D, STAGES)),
            (fetch_keys_and_ds, (k_desc, ds_desc, bufs, bars, at, D, STAGES, CAUSAL)),
        ],
        [1],
        [24],
    )
