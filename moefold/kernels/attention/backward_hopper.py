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

from moefold.kernels.hopper import (
    banded_tile,
    free_stage_before,
    make_barriers,
    split_columns,
    swizzled_buffers,
    wait_until_filled,
    wait_until_free,
    wgmma_layout,
)

LOG2E = gl.constexpr(1.4426950408889634)
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # the name before Triton 3.7, and since


class AttentionKind(NamedTuple):
    """What a kernel is compiled for: head width, stages in flight, whether queries see no later keys."""

    D: Any
    STAGES: Any
    CAUSAL: Any


class KeyProgram(NamedTuple):
    """The work of a program that has 128 keys: sequence, key/value head, key block, unit among those of this launch,
    and sizes."""

    b: Any
    g: Any
    n: Any
    local: Any
    T: Any
    H: Any
    GROUP: Any


class KeyBuffers(NamedTuple):
    """Its shared memory, and barriers: stages filled and free, keys and values filled."""

    q: Any
    k: Any
    v: Any
    dy: Any
    stat: Any
    ds: Any
    full: Any
    empty: Any
    keys_full: Any


class QueryProgram(NamedTuple):
    """The work of a program that has 128 queries: sequence, heads of keys and of queries, query block, key blocks it
    sees, query head among those of this launch, and tiles of queries."""

    b: Any
    g: Any
    h: Any
    m: Any
    key_blocks: Any
    local: Any
    T: Any


class QueryBuffers(NamedTuple):
    """Its shared memory, and barriers of stages filled and free."""

    k: Any
    ds: Any
    full: Any
    empty: Any


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
    tile += head * tiles_per_head
    return tile * 128


@gluon.jit
def fetch_positions(desc, at, bar, buf, WIDTH: gl.constexpr):
    """Start the load of 64 positions of one head."""
    shape: gl.constexpr = [1, 64, WIDTH]
    plane = buf.reshape(shape)
    tma.async_copy_global_to_shared(desc, at, bar, plane)


@gluon.jit
def send_positions(desc, at, buf, WIDTH: gl.constexpr):
    """Start the store of 64 positions of one head."""
    shape: gl.constexpr = [1, 64, WIDTH]
    plane = buf.reshape(shape)
    tma.async_copy_shared_to_global(desc, at, plane)


@gluon.jit
def broadcast_to_rows(x, layout: gl.constexpr):
    """64 numbers in shared memory as every row of a square tile."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    row = x.load(columns)
    row = row[None, :]
    return row.broadcast_to(64, 64)


@gluon.jit
def fetch_queries(descs, statistics, bufs, at, attention):
    """The producer: keys and values once; then queries, output gradients and statistics, tile by tile, head by head."""
    q_desc, k_desc, v_desc, dy_desc = descs
    D: gl.constexpr = attention.D
    STAGES: gl.constexpr = attention.STAGES
    TILE_BYTES: gl.constexpr = 64 * D * 2
    # prologue: keys and values of this program
    bar = bufs.keys_full
    mbarrier.expect(bar, 4 * TILE_BYTES)
    for w in gl.static_range(2):
        row = at.n * 128 + 64 * w
        here = [at.b, row, at.g * D]
        k_buf = bufs.k.index(w)
        fetch_positions(k_desc, here, bar, k_buf, D)
        v_buf = bufs.v.index(w)
        fetch_positions(v_desc, here, bar, v_buf, D)
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    first_tile = 2 * at.n if attention.CAUSAL else 0
    tiles = at.T - first_tile
    # main loop over query heads and tiles: wait for a free stage, then fill it
    for i in range(at.GROUP * tiles):
        h = at.g * at.GROUP + i // tiles
        t = first_tile + i % tiles
        # statistics of this tile, read early
        head = at.b * at.H + h
        tile = head * at.T + t
        tile = tile.to(gl.int64)
        first = statistics + tile * 128
        pointers = first + gl.arange(0, 128, lanes)
        stats = gl.load(pointers)
        # queries and output gradients by TMA
        s = wait_until_free(bufs.empty, i, STAGES)
        bar = bufs.full.index(s)
        mbarrier.expect(bar, 2 * TILE_BYTES)
        here = [at.b, t * 64, h * D]
        q_buf = bufs.q.index(s)
        fetch_positions(q_desc, here, bar, q_buf, D)
        dy_buf = bufs.dy.index(s)
        fetch_positions(dy_desc, here, bar, dy_buf, D)
        # statistics by this warp, whose arrival is the second
        stat_buf = bufs.stat.index(s)
        stat_buf.store(stats)
        thread_barrier()
        mbarrier.arrive(bar)


@gluon.jit
def initial_scores(stat_buf, t, W: gl.constexpr, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """The accumulator that S^T starts from: minus lse, or minus infinity where a query does not see a key."""
    minus_lse = stat_buf.slice(0, 64)
    start = broadcast_to_rows(minus_lse, layout)
    if CAUSAL and t <= W:  # the tile lies on the diagonal, or above it
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        keys = gl.arange(0, 64, rows)
        keys = keys + 64 * W
        columns: gl.constexpr = gl.SliceLayout(0, layout)
        queries = gl.arange(0, 64, columns)
        queries = queries + 64 * t
        visible = queries[None, :] >= keys[:, None]
        start = gl.where(visible, start, float("-inf"))
    return start


@gluon.jit
def accumulate_dkdv(outs, bufs, at, scale, W: gl.constexpr, attention):
    """A consumer: gradients of 64 keys and values, and their dS^T. W: which half of the program's 128 keys."""
    dk_desc, dv_desc, ds_desc = outs
    # prologue: layouts and accumulators
    kind: gl.constexpr = bufs.q.dtype
    D: gl.constexpr = attention.D
    STAGES: gl.constexpr = attention.STAGES
    CAUSAL: gl.constexpr = attention.CAUSAL
    square: gl.constexpr = wgmma_layout(64, 16)
    layout: gl.constexpr = wgmma_layout(D, 16)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_keys = gl.zeros([64, D], gl.float32, layout)
    of_values = gl.zeros([64, D], gl.float32, layout)
    keys = bufs.k.index(W)
    values = bufs.v.index(W)
    first_tile = 2 * at.n if CAUSAL else 0
    tiles = at.T - first_tile
    mbarrier.wait(bufs.keys_full, 0)
    # main loop over query heads and tiles
    for i in range(at.GROUP * tiles):
        t = i % tiles
        s = wait_until_filled(bufs.full, i, STAGES)
        q = bufs.q.index(s)
        dy = bufs.dy.index(s)
        stat = bufs.stat.index(s)
        # S^T = K Q^T - lse and dP^T = V dO^T - delta
        scores = initial_scores(stat, t, W, square, CAUSAL)
        q_columns = q.permute((1, 0))
        scores = warpgroup_mma(keys, q_columns, scores, is_async=True)
        delta = stat.slice(64, 64)
        dp = broadcast_to_rows(delta, square)
        dy_columns = dy.permute((1, 0))
        dp = warpgroup_mma(values, dy_columns, dp, is_async=True)
        # P^T, and dV += P^T dO
        scores = warpgroup_mma_wait(1, deps=(scores,))
        log2_scale = scale * LOG2E
        p = gl.exp2(scores * log2_scale)
        p_rounded = p.to(kind)
        p_left = gl.convert_layout(p_rounded, left, assert_trivial=True)
        of_values = warpgroup_mma(p_left, dy, of_values, is_async=True)
        # dS^T, and dK += dS^T Q
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = p * dp
        ds = ds.to(kind)
        ds_left = gl.convert_layout(ds, left, assert_trivial=True)
        of_keys = warpgroup_mma(ds_left, q, of_keys, is_async=True)
        # store dS^T by TMA, from two buffers in turn
        turn = i % 2
        ds_buf = bufs.ds.index(2 * W + turn)
        tma.store_wait(1)
        ds_buf.store(ds)
        fence_async_shared()
        head = at.local * at.GROUP + i // tiles
        tile = first_tile + t
        tile_row = ds_tile_first_row(head, at.n, tile, at.T, CAUSAL)
        row = tile_row + 64 * W
        tma.async_copy_shared_to_global(ds_desc, [row, 0], ds_buf)
        # the stage is free once both products have read it
        in_use = (of_values, of_keys, p_left, ds_left)
        of_values, of_keys, p_left, ds_left = warpgroup_mma_wait(0, deps=in_use)
        free = bufs.empty.index(s)
        mbarrier.arrive(free)
    # epilogue: dK and dV leave through the buffers of K and V
    dk = of_keys * scale
    dk = dk.to(kind)
    keys.store(dk)
    dv = of_values.to(kind)
    values.store(dv)
    fence_async_shared()
    row = at.n * 128 + 64 * W
    here = [at.b, row, at.g * D]
    send_positions(dk_desc, here, keys, D)
    send_positions(dv_desc, here, values, D)
    tma.store_wait(0)


@gluon.jit
def attention_dkdv_hopper(
    q_desc, k_desc, v_desc, dy_desc,
    dk_desc, dv_desc, ds_desc, statistics,
    unit, units, T, H, GROUP, band, scale,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK, dV and dS^T of so many units from `unit` on."""
    attention: gl.constexpr = AttentionKind(D, STAGES, CAUSAL)
    # prologue: shared memory
    kind: gl.constexpr = q_desc.dtype
    q_bufs = swizzled_buffers(kind, STAGES, 64, D)
    dy_bufs = swizzled_buffers(kind, STAGES, 64, D)
    k_bufs = swizzled_buffers(kind, 2, 64, D)
    v_bufs = swizzled_buffers(kind, 2, 64, D)
    ds_shape: gl.constexpr = [4, 64, 64]
    ds_bufs = gl.allocate_shared_memory(kind, ds_shape, ds_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], plain)
    # barriers
    full = make_barriers(STAGES, 2)  # TMA's arrival, and that of the statistics
    empty = make_barriers(STAGES, 2)
    one_barrier = make_barriers(1, 1)
    keys_full = one_barrier.index(0)
    bufs = KeyBuffers(q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs, ds_bufs, full, empty, keys_full)
    fence_async_shared()

    # this program's unit and key block
    blocks = T // 2
    program = gl.program_id(0)
    local, n = banded_tile(program, units, blocks, band)
    kv_head = unit + local
    kv_heads = H // GROUP
    b = kv_head // kv_heads
    g = kv_head % kv_heads
    at = KeyProgram(b, g, n, local, T, H, GROUP)
    outs = (dk_desc, dv_desc, ds_desc)
    inputs = (q_desc, k_desc, v_desc, dy_desc)
    # two consumer warpgroups and one producer warp
    first_keys = (outs, bufs, at, scale, 0, attention)
    second_keys = (outs, bufs, at, scale, 1, attention)
    fetched = (inputs, statistics, bufs, at, attention)
    gl.warp_specialize(
        [
            (accumulate_dkdv, first_keys),
            (accumulate_dkdv, second_keys),
            (fetch_queries, fetched),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def fetch_keys_and_ds(k_desc, ds_desc, bufs, at, attention):
    """The producer: 64 keys at a time, and their dS^T for two query tiles."""
    D: gl.constexpr = attention.D
    STAGES: gl.constexpr = attention.STAGES
    CAUSAL: gl.constexpr = attention.CAUSAL
    WIDTH: gl.constexpr = D + 2 * 64  # of keys and two tiles of dS^T
    # main loop over keys, 64 at a time: wait for a free stage, then fill it
    for i in range(2 * at.key_blocks):
        s = wait_until_free(bufs.empty, i, STAGES)
        bar = bufs.full.index(s)
        mbarrier.expect(bar, WIDTH * 64 * 2)
        here = [at.b, i * 64, at.g * D]
        k_buf = bufs.k.index(s)
        fetch_positions(k_desc, here, bar, k_buf, D)
        for c in gl.static_range(2):
            t = 2 * at.m + c
            n = i // 2
            tile_row = ds_tile_first_row(at.local, n, t, at.T, CAUSAL)
            half = i % 2
            row = tile_row + half * 64
            ds_buf = bufs.ds.index(2 * s + c)
            tma.async_copy_global_to_shared(ds_desc, [row, 0], bar, ds_buf)


@gluon.jit
def accumulate_dq(dq_desc, bufs, at, scale, attention):
    """The consumer: the gradient of 128 queries, two tiles."""
    D: gl.constexpr = attention.D
    STAGES: gl.constexpr = attention.STAGES
    layout: gl.constexpr = wgmma_layout(D, 16)
    one = gl.zeros([64, D], gl.float32, layout)
    two = gl.zeros([64, D], gl.float32, layout)
    # main loop over keys, 64 at a time; a stage is freed one step later, when its products are done
    for i in range(2 * at.key_blocks):
        s = wait_until_filled(bufs.full, i, STAGES)
        keys = bufs.k.index(s)
        # dQ += dS K, for both tiles
        ds_one = bufs.ds.index(2 * s)
        ds_rows = ds_one.permute((1, 0))
        one = warpgroup_mma(ds_rows, keys, one, is_async=True)
        ds_two = bufs.ds.index(2 * s + 1)
        ds_rows = ds_two.permute((1, 0))
        two = warpgroup_mma(ds_rows, keys, two, is_async=True)
        # the products of the step before are done
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        has_before = i > 0
        free_stage_before(bufs.empty, i, has_before, STAGES)
    # epilogue: dQ leaves through the buffers of dS^T, to which no load is in flight any more
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    row = 128 * at.m
    column = at.h * D
    store_dq_tile(dq_desc, bufs.ds, one * scale, at.b, row, column, 0, D)
    store_dq_tile(dq_desc, bufs.ds, two * scale, at.b, row + 64, column, 2, D)
    tma.store_wait(0)


@gluon.jit
def store_dq_tile(dq_desc, bufs, x, b, row, column, FIRST: gl.constexpr, D: gl.constexpr):
    """Store 64 queries' gradient by TMA through one buffer, or two, from FIRST on."""
    x = x.to(bufs.dtype)
    # to shared memory, 64 columns to a buffer
    if D == 128:
        x, right = split_columns(x, 64, D)
        second_buf = bufs.index(FIRST + 1)
        second_buf.store(right)
    first_buf = bufs.index(FIRST)
    first_buf.store(x)
    fence_async_shared()
    # from there to memory
    for c in gl.static_range(D // 64):
        here = [b, row, column + 64 * c]
        buf = bufs.index(FIRST + c)
        send_positions(dq_desc, here, buf, 64)


@gluon.jit
def attention_dq_hopper(
    k_desc, ds_desc, dq_desc,
    unit, heads, T, H, GROUP, band, scale,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dQ of so many heads, from the first of `unit` on: 128 queries a program, those that see most keys first. Two
    programs fit on a multiprocessor: one is in its prologue or epilogue while the other multiplies."""
    attention: gl.constexpr = AttentionKind(D, STAGES, CAUSAL)
    # prologue: shared memory and barriers
    kind: gl.constexpr = k_desc.dtype
    k_bufs = swizzled_buffers(kind, STAGES, 64, D)
    ds_shape: gl.constexpr = [2 * STAGES, 64, 64]
    ds_bufs = gl.allocate_shared_memory(kind, ds_shape, ds_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1)
    bufs = QueryBuffers(k_bufs, ds_bufs, full, empty)
    fence_async_shared()

    # this program's head and query block
    blocks = T // 2
    program = gl.program_id(0)
    local, rank = banded_tile(program, heads, blocks, band)
    head = unit * GROUP + local
    b = head // H
    h = head % H
    g = h // GROUP
    m = blocks - 1 - rank
    key_blocks = m + 1 if CAUSAL else blocks
    at = QueryProgram(b, g, h, m, key_blocks, local, T)
    # one consumer warpgroup and one producer warp
    consumed = (dq_desc, bufs, at, scale, attention)
    fetched = (k_desc, ds_desc, bufs, at, attention)
    gl.warp_specialize(
        [
            (accumulate_dq, consumed),
            (fetch_keys_and_ds, fetched),
        ],
        [1],
        [24],
    )
