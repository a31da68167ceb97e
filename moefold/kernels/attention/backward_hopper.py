"""Backward of causal attention for Hopper, in Gluon: scores are computed once and no sum has two owners, so no product
is done twice and two runs agree to the bit.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dK = dS^T Q    dV = P^T dO    dQ = dS K

`attention_keys`: a program has 128 keys, walks over all queries from them on and adds up dK and dV in registers. It
works on S^T, whose rows are keys: then P^T and dS^T are left operands as they stand in the registers. On its way it
writes dS^T down. `attention_queries` reads that, and is a plain product, dQ = dS K. (Without writing it down, either
scores are computed again for dQ, seven products instead of five, or dQ is handed round among all that have keys of it.)

In both, one warp fetches (TMA) and two warpgroups, or one, multiply. dS^T lies in tiles of 128 keys by 64 queries: of
a head, first those of its first 128 keys, then those of the next, as far as queries see them.

B sequences, S positions, H query heads, D head width; T tiles of 64 queries and N = T / 2 blocks of 128 keys, the last
of which may reach beyond S: there come zeros, and nothing is written. A unit is a key/value head of a sequence with the
GROUP query heads it serves.
"""

# ruff: noqa: RUF059  (device code takes tuples apart by name)

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

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
    """Where tile (n, t) of a head's dS^T begins. Keys n are seen by tiles from 2 n on."""
    N = T // 2
    return (head * (N * T - N * (N - 1)) + n * T - n * (n - 1) + t - 2 * n) * 128


@gluon.jit
def fetch_queries(descs, statistics, bufs, bars, at, D: gl.constexpr, STAGES: gl.constexpr):
    """Keys and values once; then queries, gradients of the result and statistics, tile after tile, head after head."""
    q_desc, k_desc, v_desc, dy_desc = descs
    q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs = bufs
    full, empty, keys_full = bars
    b, g, n, local, T, H, GROUP = at
    mbarrier.expect(keys_full, 4 * 64 * D * 2)
    for w in gl.static_range(2):
        here = [b, n * 128 + 64 * w, g * D]
        tma.async_copy_global_to_shared(k_desc, here, keys_full, k_bufs.index(w).reshape([1, 64, D]))
        tma.async_copy_global_to_shared(v_desc, here, keys_full, v_bufs.index(w).reshape([1, 64, D]))
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    tiles = T - 2 * n
    for i in range(GROUP * tiles):
        s = i % STAGES
        h = g * GROUP + i // tiles
        t = 2 * n + i % tiles
        bar = full.index(s)
        found = gl.load(statistics + ((b * H + h) * T + t).to(gl.int64) * 128 + gl.arange(0, 128, lanes))
        mbarrier.wait(empty.index(s), (i // STAGES) & 1 ^ 1)
        mbarrier.expect(bar, 2 * 64 * D * 2)
        tma.async_copy_global_to_shared(q_desc, [b, t * 64, h * D], bar, q_bufs.index(s).reshape([1, 64, D]))
        tma.async_copy_global_to_shared(dy_desc, [b, t * 64, h * D], bar, dy_bufs.index(s).reshape([1, 64, D]))
        stat_bufs.index(s).store(found)
        gl.thread_barrier()
        mbarrier.arrive(bar)


@gluon.jit
def initial_scores(stat_buf, t, W: gl.constexpr, layout: gl.constexpr):
    """What S^T is added to: minus lse, or minus infinity where a query does not see a key."""
    start = stat_buf.slice(0, 64).load(gl.SliceLayout(0, layout))[None, :].broadcast_to(64, 64)
    if t <= W:
        keys = gl.arange(0, 64, gl.SliceLayout(1, layout)) + 64 * W
        queries = gl.arange(0, 64, gl.SliceLayout(0, layout)) + 64 * t
        start = gl.where(queries[None, :] >= keys[:, None], start, float("-inf"))
    return start


@gluon.jit
def accumulate_dkdv(outs, bufs, ds_bufs, bars, at, scale, W: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Gradients of 64 keys and values, and their dS^T."""
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
    for i in range(GROUP * tiles):
        s = i % STAGES
        t = i % tiles
        q, dy, stat = q_bufs.index(s), dy_bufs.index(s), stat_bufs.index(s)
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        scores = initial_scores(stat, t, W, square)
        scores = warpgroup_mma(k_bufs.index(W), q.permute((1, 0)), scores, is_async=True)
        dp = stat.slice(64, 64).load(gl.SliceLayout(0, square))[None, :].broadcast_to(64, 64)
        dp = warpgroup_mma(v_bufs.index(W), dy.permute((1, 0)), dp, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * (scale * 1.4426950408889634))
        p_left = gl.convert_layout(p.to(kind), left, assert_trivial=True)
        of_values = warpgroup_mma(p_left, dy, of_values, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(kind)
        ds_left = gl.convert_layout(ds, left, assert_trivial=True)
        of_keys = warpgroup_mma(ds_left, q, of_keys, is_async=True)
        ds_buf = ds_bufs.index(2 * W + i % 2)
        tma.store_wait(1)
        ds_buf.store(ds)
        fence_async_shared()
        here = ds_tile_first_row(local * GROUP + i // tiles, n, 2 * n + t, T) + 64 * W
        tma.async_copy_shared_to_global(ds_desc, [here, 0], ds_buf)
        of_values, of_keys, p_left, ds_left = warpgroup_mma_wait(0, deps=(of_values, of_keys, p_left, ds_left))
        mbarrier.arrive(empty.index(s))
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
        mbarrier.init(full.index(s), count=2)  # what the copy engine brings, and the statistics
        mbarrier.init(empty.index(s), count=2)
    mbarrier.init(keys_full, count=1)
    fence_async_shared()

    local, n = banded_tile(gl.program_id(0), units, T // 2, band)
    b, g = (unit + local) // (H // GROUP), (unit + local) % (H // GROUP)
    at = (b, g, n, local, T, H, GROUP)
    outs = (dk_desc, dv_desc, ds_desc)
    bufs = (q_bufs, k_bufs, v_bufs, dy_bufs, stat_bufs)
    bars = (full, empty, keys_full)
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
    """64 keys at a time: themselves, and their dS^T of two tiles of queries."""
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
    """The gradient of 128 queries, two tiles."""
    k_bufs, ds_bufs = bufs
    full, empty = bars
    b, g, h, m, local, T = at
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    one = gl.zeros([64, D], gl.float32, layout)
    two = gl.zeros([64, D], gl.float32, layout)
    for i in range(2 * (m + 1)):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        one = warpgroup_mma(ds_bufs.index(2 * s).permute((1, 0)), k_bufs.index(s), one, is_async=True)
        two = warpgroup_mma(ds_bufs.index(2 * s + 1).permute((1, 0)), k_bufs.index(s), two, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    store_dq_tile(
        dq_desc, ds_bufs, one * scale, [b, 128 * m, h * D], 0, D
    )  # nothing is on its way to the buffers any more
    store_dq_tile(dq_desc, ds_bufs, two * scale, [b, 128 * m + 64, h * D], 2, D)
    tma.store_wait(0)


@gluon.jit
def store_dq_tile(dq_desc, bufs, x, at, FIRST: gl.constexpr, D: gl.constexpr):
    """Write 64 queries' gradient by way of one buffer, or two, from FIRST on."""
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
    """dQ of so many heads, from the first of `unit` on: 128 queries a program, those that see most keys first. Small
    enough for two on a multiprocessor: one begins or ends while the other multiplies."""
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

    local, rank = banded_tile(gl.program_id(0), heads, T // 2, band)
    head = unit * GROUP + local
    b, h = head // H, head % H
    at = (b, h // GROUP, h, T // 2 - 1 - rank, local, T)
    bufs, bars = (k_bufs, ds_bufs), (full, empty)
    gl.warp_specialize(
        [
            (accumulate_dq, (dq_desc, bufs, bars, at, scale, D, STAGES)),
            (fetch_keys_and_ds, (k_desc, ds_desc, bufs, bars, at, D, STAGES)),
        ],
        [1],
        [24],
    )
