"""Backward of attention for Hopper, in Gluon: scores are computed once and each sum has one owner, so no product is
done twice and two runs agree to the bit. Attention is causal or, for blocks of ring attention, over all keys.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dK = dS^T Q    dV = P^T dO    dQ = dS K

`attention_dkdv_hopper`: a program has 128 keys, loops over all queries from them on and accumulates dK and dV in
registers. It computes S^T, whose rows are keys: P^T and dS^T are then left operands as they lie in the registers. It
also stores dS^T. `attention_dq_hopper` reads dS^T and is a plain GEMM, dQ = dS K. (Without storing it, either scores
are computed again for dQ, seven products instead of five, or dQ is accumulated by several programs.)

Queries and keys may be wider than values, as in MLA: tensors here are powers of two wide, so those of 192 columns are
two, of 128 and 64. The wider dK takes registers from P, which is then rounded before dS is formed of it.

In both, one warp is the producer (TMA loads), and two warpgroups, or one, are consumers (wgmma). dS^T is stored in
tiles of 128 keys by 64 queries: the tiles of a head's first 128 keys, then those of the next, as far as queries see
them.

A launch has a part of the work: a strip of the queries, a range of the keys that they see, and some query heads of each
group, as many as the memory for dS^T holds (`backward_parts.py`). Sums are carried in fp32 from one launch to the next:
accumulators start from them, and leave to them until the last. Keys have the strips in their order, queries the ranges.
Keys with further columns and programs with two consumers of queries have whole sequences alone.

B sequences, S positions, H query heads, D first columns of a query or key and E further ones (64 or none), V width of a
value; T tiles of 64 queries and N = T / 2 blocks of 128 keys, the last of which may reach beyond S: loads give zeros
there, and nothing is stored. A unit is a key/value head of a sequence with the GROUP query heads it serves.
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
    shared_blocks,
    split_columns,
    swizzled_buffers,
    wait_until_filled,
    wait_until_free,
    wgmma_layout,
)

LOG2E = gl.constexpr(1.4426950408889634)
# other ones for every launch of a sequence: not compiled anew for those that are one or multiples of 16
LAUNCH_NUMBERS = ["unit", "units", "top", "end", "first", "last", "first_head", "heads", "band"]
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # the name before Triton 3.7, and since


# Two 16-bit numbers times two of 32 bits, rounded.
BF16_PRODUCT = gl.constexpr("""{
    .reg .f32 low, high;
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    mul.f32 low, low, $2;
    mul.f32 high, high, $3;
    cvt.rn.bf16x2.f32 $0, high, low;
}""")
FP16_PRODUCT = gl.constexpr("""{
    .reg .b16 first, second;
    .reg .f32 low, high;
    mov.b32 {first, second}, $1;
    cvt.f32.f16 low, first;
    cvt.f32.f16 high, second;
    mul.f32 low, low, $2;
    mul.f32 high, high, $3;
    cvt.rn.f16x2.f32 $0, high, low;
}""")


class AttentionKind(NamedTuple):
    """What the first kernel is compiled for: widths, stages in flight, buffers of dS^T for each consumer, whether
    queries see no later keys."""

    D: Any
    E: Any
    V: Any
    STAGES: Any
    TURNS: Any
    CAUSAL: Any


class LaunchPart(NamedTuple):
    """What a launch has: query tiles from `top` to before `end`, key blocks from `first` to before `last`, so many
    query heads of each group from `head` on; and the tiles of a head's dS^T."""

    top: Any
    end: Any
    first: Any
    last: Any
    head: Any
    heads: Any
    tiles_per_head: Any


class KeyProgram(NamedTuple):
    """The work of a program that has 128 keys: sequence, key/value head, key block, unit among those of this launch,
    part, first of its tiles that see the keys, and sizes."""

    b: Any
    g: Any
    n: Any
    local: Any
    part: Any
    first_tile: Any
    T: Any
    H: Any
    GROUP: Any


class CarriedSums(NamedTuple):
    """dK and dV, or dQ twice, in fp32, in tiles of 64 positions, or None where one launch has all; the first of the
    program's tiles, whether launches before had them, and whether none will."""

    one: Any
    two: Any
    tile: Any
    has_before: Any
    is_last: Any


class KeyBuffers(NamedTuple):
    """Its shared memory, and barriers: stages filled and free, keys and values filled."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    dy: Any
    stat: Any
    ds: Any
    full: Any
    empty: Any
    keys_full: Any


class QueryKind(NamedTuple):
    """What the second kernel is compiled for: widths, stages in flight, keys of a stage, consumers with 128 queries
    each, whether queries see no later keys."""

    D: Any
    E: Any
    STAGES: Any
    KEYS: Any
    CONSUMERS: Any
    CAUSAL: Any


class QueryProgram(NamedTuple):
    """The work of a program that has 128 queries for each consumer: sequence, heads of keys and of queries, first query
    block, query head among those of this launch, and the launch's part."""

    b: Any
    g: Any
    h: Any
    m: Any
    local: Any
    part: Any


class QueryBuffers(NamedTuple):
    """Its shared memory, and barriers of stages filled and free."""

    k: Any
    k_rest: Any
    ds: Any
    full: Any
    empty: Any


@gluon.jit
def blocks_behind(n, top):
    """By how many key blocks n is behind the first that the strip's first queries do not see wholly."""
    diagonal = top // 2
    return gl.maximum(n - diagonal, 0)


@gluon.jit
def part_of_launch(top, end, first, last, head, heads, CAUSAL: gl.constexpr):
    tiles_per_head = (end - top) * (last - first)
    if CAUSAL:
        behind = blocks_behind(last - 1, top)
        tiles_per_head -= behind * (behind + 1)
    return LaunchPart(top, end, first, last, head, heads, tiles_per_head)


@gluon.jit
def ds_tile_first_row(head, n, t, behind, part, CAUSAL: gl.constexpr):
    """The first row of tile (n, t) of a head's dS^T. Key block n is seen by all query tiles of the strip or, if causal,
    by those from the 2 `behind`-th on (`blocks_behind`)."""
    tiles = part.end - part.top
    tile = head * part.tiles_per_head + (n - part.first) * tiles + t - part.top
    if CAUSAL:
        tile -= behind * (behind + 1)
    return tile * 128


@gluon.jit
def fetch_positions(desc, at, bar, buf, WIDTH: gl.constexpr, NUMBER: gl.constexpr = 64):
    """Start the load of some positions of one head."""
    shape: gl.constexpr = [1, NUMBER, WIDTH]
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
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, dy_desc = descs
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    V: gl.constexpr = attention.V
    STAGES: gl.constexpr = attention.STAGES
    TILE_BYTES: gl.constexpr = 64 * (D + E + V) * 2
    # prologue: keys and values of this program
    bar = bufs.keys_full
    mbarrier.expect(bar, 2 * TILE_BYTES)
    for w in gl.static_range(2):
        row = at.n * 128 + 64 * w
        column = at.g * (D + E)
        k_buf = bufs.k.index(w)
        fetch_positions(k_desc, [at.b, row, column], bar, k_buf, D)
        if E:
            rest_buf = bufs.k_rest.index(w)
            fetch_positions(k_rest_desc, [at.b, row, column + D], bar, rest_buf, E)
        v_buf = bufs.v.index(w)
        fetch_positions(v_desc, [at.b, row, at.g * V], bar, v_buf, V)
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    tiles = at.part.end - at.first_tile
    first_head = at.g * at.GROUP + at.part.head
    # main loop over query heads and tiles: wait for a free stage, then fill it
    for i in range(at.part.heads * tiles):
        h = first_head + i // tiles
        t = at.first_tile + i % tiles
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
        mbarrier.expect(bar, TILE_BYTES)
        row = t * 64
        column = h * (D + E)
        q_buf = bufs.q.index(s)
        fetch_positions(q_desc, [at.b, row, column], bar, q_buf, D)
        if E:
            rest_buf = bufs.q_rest.index(s)
            fetch_positions(q_rest_desc, [at.b, row, column + D], bar, rest_buf, E)
        dy_buf = bufs.dy.index(s)
        fetch_positions(dy_desc, [at.b, row, h * V], bar, dy_buf, V)
        # statistics by this warp, whose arrival is the second
        stat_buf = bufs.stat.index(s)
        stat_buf.store(stats)
        thread_barrier()
        mbarrier.arrive(bar)


@gluon.jit
def carried_pointers(sums, tile, D: gl.constexpr, layout: gl.constexpr):
    """Those of 64 positions."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    tile = tile.to(gl.int64)
    first = sums + tile * (64 * D)
    return first + rows[:, None] * D + columns[None, :]


@gluon.jit
def initial_sums(sums, tile, has_before, D: gl.constexpr, layout: gl.constexpr):
    """The accumulator that a gradient of 64 positions starts from."""
    if sums is None:
        return gl.zeros([64, D], gl.float32, layout)
    else:
        pointers = carried_pointers(sums, tile, D, layout)
        return gl.load(pointers, mask=has_before, other=0.0)


@gluon.jit
def leave_sums(sums, tile, values, D: gl.constexpr, layout: gl.constexpr):
    """What the next launch starts from."""
    pointers = carried_pointers(sums, tile, D, layout)
    gl.store(pointers, values)


@gluon.jit
def initial_scores(stat_buf, t, W: gl.constexpr, layout: gl.constexpr, CAUSAL: gl.constexpr):
    """The accumulator that S^T starts from: minus lse, or minus infinity where a query does not see a key. t: the
    query tile, counted from the first that sees some of the keys of a causal program."""
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
def rounded_product(p, dp):
    """P dP, rounded, of P that is rounded already: two numbers at a time, so that P needs half the registers."""
    if p.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(BF16_PRODUCT, "=r,r,f,f", [p, dp], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise(FP16_PRODUCT, "=r,r,f,f", [p, dp], gl.float16, True, 2)


@gluon.jit
def accumulate_dkdv(outs, carried, bufs, at, scale, W: gl.constexpr, attention):
    """A consumer: gradients of 64 keys and values, and their dS^T. W: which half of the program's 128 keys."""
    _, _, _, ds_desc = outs
    # prologue: layouts and accumulators
    kind: gl.constexpr = bufs.q.dtype
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    V: gl.constexpr = attention.V
    STAGES: gl.constexpr = attention.STAGES
    TURNS: gl.constexpr = attention.TURNS
    CAUSAL: gl.constexpr = attention.CAUSAL
    square: gl.constexpr = wgmma_layout(64, 16)
    key_layout: gl.constexpr = wgmma_layout(D, 16)
    value_layout: gl.constexpr = wgmma_layout(V, 16)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, key_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    sums_tile = carried.tile + W
    of_keys = initial_sums(carried.one, sums_tile, carried.has_before, D, key_layout)
    of_values = initial_sums(carried.two, sums_tile, carried.has_before, V, value_layout)
    keys = bufs.k.index(W)
    values = bufs.v.index(W)
    of_rest = None
    if E:
        of_rest = gl.zeros([64, E], gl.float32, square)
        rest_keys = bufs.k_rest.index(W)
        rest_left_layout: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    tiles = at.part.end - at.first_tile
    after_diagonal = at.first_tile - 2 * at.n
    head = at.local * at.part.heads
    behind = blocks_behind(at.n, at.part.top)
    first_row = ds_tile_first_row(head, at.n, at.first_tile, behind, at.part, CAUSAL)
    first_row += 64 * W
    mbarrier.wait(bufs.keys_full, 0)
    # main loop over query heads and tiles
    for i in range(at.part.heads * tiles):
        t = i % tiles
        s = wait_until_filled(bufs.full, i, STAGES)
        q = bufs.q.index(s)
        dy = bufs.dy.index(s)
        stat = bufs.stat.index(s)
        # S^T = K Q^T - lse and dP^T = V dO^T - delta
        scores = initial_scores(stat, t + after_diagonal, W, square, CAUSAL)
        q_columns = q.permute((1, 0))
        scores = warpgroup_mma(keys, q_columns, scores, is_async=True)
        if E:
            rest = bufs.q_rest.index(s)
            rest_columns = rest.permute((1, 0))
            scores = warpgroup_mma(rest_keys, rest_columns, scores, is_async=True)
        delta = stat.slice(64, 64)
        dy_columns = dy.permute((1, 0))
        if E == 0:
            dp = broadcast_to_rows(delta, square)
            dp = warpgroup_mma(values, dy_columns, dp, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
        else:  # further columns leave no registers for S^T and dP^T at once
            scores = warpgroup_mma_wait(0, deps=(scores,))
        # P^T, and dV += P^T dO
        log2_scale = scale * LOG2E
        p = gl.exp2(scores * log2_scale)
        p_rounded = p.to(kind)
        p_left = gl.convert_layout(p_rounded, p_layout, assert_trivial=True)
        of_values = warpgroup_mma(p_left, dy, of_values, is_async=True)
        # dS^T, and dK += dS^T Q
        if E == 0:
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = p * dp
            ds = ds.to(kind)
        else:
            dp = broadcast_to_rows(delta, square)
            dp = warpgroup_mma(values, dy_columns, dp, is_async=True)
            dp, of_values, p_left = warpgroup_mma_wait(0, deps=(dp, of_values, p_left))
            p_rounded = gl.convert_layout(p_left, square, assert_trivial=True)
            ds = rounded_product(p_rounded, dp)
        ds_left = gl.convert_layout(ds, ds_layout, assert_trivial=True)
        of_keys = warpgroup_mma(ds_left, q, of_keys, is_async=True)
        if E:
            rest_left = gl.convert_layout(ds, rest_left_layout, assert_trivial=True)
            of_rest = warpgroup_mma(rest_left, rest, of_rest, is_async=True)
        # store dS^T by TMA, from the consumer's buffers in turn
        turn = i % TURNS
        ds_buf = bufs.ds.index(TURNS * W + turn)
        tma.store_wait(TURNS - 1)
        ds_buf.store(ds)
        fence_async_shared()
        tile = i // tiles * at.part.tiles_per_head + t
        row = first_row + 128 * tile
        tma.async_copy_shared_to_global(ds_desc, [row, 0], ds_buf)
        # the stage is free once all products have read it
        if E:
            of_keys, of_rest, ds_left = warpgroup_mma_wait(0, deps=(of_keys, of_rest, ds_left))
        else:
            in_use = (of_values, of_keys, p_left, ds_left)
            of_values, of_keys, p_left, ds_left = warpgroup_mma_wait(0, deps=in_use)
        free = bufs.empty.index(s)
        mbarrier.arrive(free)
    # epilogue: sums to the next launch, or dK and dV through the buffers of K and V
    if carried.one is None:  # noqa: SIM114, decided when compiled
        send_gradients(outs, of_keys, of_rest, of_values, bufs, at, scale, W, attention)
    elif carried.is_last:
        send_gradients(outs, of_keys, of_rest, of_values, bufs, at, scale, W, attention)
    else:
        leave_sums(carried.one, sums_tile, of_keys, D, key_layout)
        leave_sums(carried.two, sums_tile, of_values, V, value_layout)
    tma.store_wait(0)


@gluon.jit
def send_gradients(outs, of_keys, of_rest, of_values, bufs, at, scale, W: gl.constexpr, attention):
    """dK and dV of 64 keys leave through the buffers of K and V."""
    dk_desc, dk_rest_desc, dv_desc, _ = outs
    kind: gl.constexpr = bufs.q.dtype
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    V: gl.constexpr = attention.V
    keys = bufs.k.index(W)
    values = bufs.v.index(W)
    dk = of_keys * scale
    dk = dk.to(kind)
    keys.store(dk)
    if E:
        rest_keys = bufs.k_rest.index(W)
        dk_rest = of_rest * scale
        dk_rest = dk_rest.to(kind)
        rest_keys.store(dk_rest)
    dv = of_values.to(kind)
    values.store(dv)
    fence_async_shared()
    row = at.n * 128 + 64 * W
    column = at.g * (D + E)
    send_positions(dk_desc, [at.b, row, column], keys, D)
    if E:
        send_positions(dk_rest_desc, [at.b, row, column + D], rest_keys, E)
    send_positions(dv_desc, [at.b, row, at.g * V], values, V)


@gluon.jit(do_not_specialize=LAUNCH_NUMBERS)
def attention_dkdv_hopper(
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    v_desc,
    dy_desc,
    dk_desc,
    dk_rest_desc,
    dv_desc,
    ds_desc,
    dk_sums,
    dv_sums,
    statistics,
    unit,
    units,
    top,
    end,
    first,
    last,
    first_head,
    heads,
    T,
    H,
    GROUP,
    band,
    scale,
    D: gl.constexpr,
    E: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dK, dV and dS^T of so many units from `unit` on, for a part of their queries."""
    attention: gl.constexpr = AttentionKind(D, E, V, STAGES, TURNS, CAUSAL)
    # prologue: shared memory
    kind: gl.constexpr = q_desc.dtype
    q_bufs = swizzled_buffers(kind, STAGES, 64, D)
    dy_bufs = swizzled_buffers(kind, STAGES, 64, V)
    k_bufs = swizzled_buffers(kind, 2, 64, D)
    v_bufs = swizzled_buffers(kind, 2, 64, V)
    q_rest_bufs = swizzled_buffers(kind, STAGES, 64, E) if E else None
    k_rest_bufs = swizzled_buffers(kind, 2, 64, E) if E else None
    ds_shape: gl.constexpr = [2 * TURNS, 64, 64]
    ds_bufs = gl.allocate_shared_memory(kind, ds_shape, ds_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 128], plain)
    # barriers
    full = make_barriers(STAGES, 2)  # TMA's arrival, and that of the statistics
    empty = make_barriers(STAGES, 2)
    one_barrier = make_barriers(1, 1)
    keys_full = one_barrier.index(0)
    barriers = (full, empty, keys_full)
    bufs = KeyBuffers(q_bufs, q_rest_bufs, k_bufs, k_rest_bufs, v_bufs, dy_bufs, stat_bufs, ds_bufs, *barriers)
    fence_async_shared()

    # this program's unit and key block
    part = part_of_launch(top, end, first, last, first_head, heads, CAUSAL)
    program = gl.program_id(0)
    local, place = banded_tile(program, units, last - first, band)
    n = first + place
    kv_head = unit + local
    kv_heads = H // GROUP
    b = kv_head // kv_heads
    g = kv_head % kv_heads
    first_tile = top
    if CAUSAL:
        first_tile += 2 * blocks_behind(n, top)
    at = KeyProgram(b, g, n, local, part, first_tile, T, H, GROUP)
    # sums of other launches
    earliest = 2 * n if CAUSAL else 0
    has_before = (first_head > 0) | (earliest < top)
    is_last = (end == T) & (first_head + heads == GROUP)
    sums_tile = local * T + 2 * n
    carried = CarriedSums(dk_sums, dv_sums, sums_tile, has_before, is_last)
    outs = (dk_desc, dk_rest_desc, dv_desc, ds_desc)
    inputs = (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, dy_desc)
    # two consumer warpgroups and one producer warp
    first_keys = (outs, carried, bufs, at, scale, 0, attention)
    second_keys = (outs, carried, bufs, at, scale, 1, attention)
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
def stages_of_consumer(at, W: gl.constexpr, attention):
    """How many stages consumer W works on: those with keys of the part that its queries see."""
    behind = at.part.last
    if attention.CAUSAL:
        behind = gl.minimum(at.m + W + 1, behind)
    return (behind - at.part.first) * (128 // attention.KEYS)


@gluon.jit
def fetch_keys_and_ds(descs, bufs, at, attention):
    """The producer: some keys at a time, and their dS^T for two query tiles of each consumer."""
    k_desc, k_rest_desc, ds_desc = descs
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    STAGES: gl.constexpr = attention.STAGES
    KEYS: gl.constexpr = attention.KEYS
    CONSUMERS: gl.constexpr = attention.CONSUMERS
    CAUSAL: gl.constexpr = attention.CAUSAL
    PARTS: gl.constexpr = 128 // KEYS
    WIDTH: gl.constexpr = D + E + 2 * 64  # of keys and two tiles of dS^T
    column = at.g * (D + E)
    # main loop over keys: wait for a free stage, then fill it
    for i in range(stages_of_consumer(at, CONSUMERS - 1, attention)):
        s = wait_until_free(bufs.empty, i, STAGES)
        bar = bufs.full.index(s)
        # of two consumers, the first may have seen all of its keys
        both = True
        if CONSUMERS == 2:
            end_of_both = stages_of_consumer(at, 0, attention)
            both = i < end_of_both
            mbarrier.expect(bar, WIDTH * KEYS * 2, pred=i >= end_of_both)
        MORE: gl.constexpr = 2 * 64 * (CONSUMERS - 1)
        mbarrier.expect(bar, (WIDTH + MORE) * KEYS * 2, pred=both)
        n = at.part.first + i // PARTS
        part = i % PARTS
        row = n * 128 + part * KEYS
        k_buf = bufs.k.index(s)
        fetch_positions(k_desc, [at.b, row, column], bar, k_buf, D, KEYS)
        if E:
            rest_buf = bufs.k_rest.index(s)
            fetch_positions(k_rest_desc, [at.b, row, column + D], bar, rest_buf, E, KEYS)
        behind = blocks_behind(n, at.part.top)
        for c in gl.static_range(2 * CONSUMERS):
            t = 2 * at.m + c
            tile_row = ds_tile_first_row(at.local, n, t, behind, at.part, CAUSAL)
            ds_row = tile_row + part * KEYS
            ds_buf = bufs.ds.index(2 * (c // 2 * STAGES + s) + c % 2)
            there = both if c // 2 < CONSUMERS - 1 else True
            tma.async_copy_global_to_shared(ds_desc, [ds_row, 0], bar, ds_buf, pred=there)


@gluon.jit
def accumulate_dq(dq_desc, carried, bufs, at, scale, W: gl.constexpr, attention):
    """A consumer: the gradient of 128 queries, two tiles. W: which 128 of the program's queries."""
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    STAGES: gl.constexpr = attention.STAGES
    PRODUCTS: gl.constexpr = 4 if E else 2
    first_buffer = 2 * STAGES * W
    layout: gl.constexpr = wgmma_layout(D, 16)
    first_of_sums = carried.tile + 2 * W
    one = initial_sums(carried.one, first_of_sums, carried.has_before, D, layout)
    two = initial_sums(carried.two, first_of_sums + 1, carried.has_before, D, layout)
    one_rest = None
    two_rest = None
    if E:
        rest_layout: gl.constexpr = wgmma_layout(E, 16)
        one_rest = gl.zeros([64, E], gl.float32, rest_layout)
        two_rest = gl.zeros([64, E], gl.float32, rest_layout)
    # main loop over keys; a stage is freed one step later, when its products are done
    for i in range(stages_of_consumer(at, W, attention)):
        s = wait_until_filled(bufs.full, i, STAGES)
        keys = bufs.k.index(s)
        # dQ += dS K, for both tiles
        ds_one = bufs.ds.index(first_buffer + 2 * s)
        one_rows = ds_one.permute((1, 0))
        one = warpgroup_mma(one_rows, keys, one, is_async=True)
        ds_two = bufs.ds.index(first_buffer + 2 * s + 1)
        two_rows = ds_two.permute((1, 0))
        two = warpgroup_mma(two_rows, keys, two, is_async=True)
        if E:
            rest_keys = bufs.k_rest.index(s)
            one_rest = warpgroup_mma(one_rows, rest_keys, one_rest, is_async=True)
            two_rest = warpgroup_mma(two_rows, rest_keys, two_rest, is_async=True)
            one_rest, two_rest = warpgroup_mma_wait(PRODUCTS, deps=(one_rest, two_rest))
        # the products of the step before are done
        one, two = warpgroup_mma_wait(PRODUCTS, deps=(one, two))
        has_before = i > 0
        free_stage_before(bufs.empty, i, has_before, STAGES)
    # epilogue: sums to the next launch, or dQ
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    if E:
        one_rest, two_rest = warpgroup_mma_wait(0, deps=(one_rest, two_rest))
        one_rest = one_rest * scale
        two_rest = two_rest * scale
    if carried.one is None:  # noqa: SIM114, decided when compiled
        send_dq(dq_desc, one * scale, one_rest, two * scale, two_rest, bufs, at, W, attention)
    elif carried.is_last:
        send_dq(dq_desc, one * scale, one_rest, two * scale, two_rest, bufs, at, W, attention)
    else:
        leave_sums(carried.one, first_of_sums, one, D, layout)
        leave_sums(carried.two, first_of_sums + 1, two, D, layout)
    tma.store_wait(0)


@gluon.jit
def send_dq(dq_desc, one, one_rest, two, two_rest, bufs, at, W: gl.constexpr, attention):
    """dQ leaves through the consumer's buffers of dS^T, to which no load is in flight any more."""
    WIDTH: gl.constexpr = attention.D + attention.E
    row = 128 * (at.m + W)
    column = at.h * WIDTH
    planes = shared_blocks(bufs.ds, 64, 64)
    MEMORY: gl.constexpr = 2 * attention.STAGES * attention.KEYS // 64
    first = MEMORY * W
    NEEDED: gl.constexpr = WIDTH // 64
    store_dq_tile(dq_desc, planes, one, one_rest, at.b, row, column, first, attention)
    if MEMORY < 2 * NEEDED:
        tma.store_wait(0)
        store_dq_tile(dq_desc, planes, two, two_rest, at.b, row + 64, column, first, attention)
    else:
        store_dq_tile(dq_desc, planes, two, two_rest, at.b, row + 64, column, first + NEEDED, attention)


@gluon.jit
def store_dq_tile(dq_desc, bufs, x, rest, b, row, column, first, attention):
    """Store 64 queries' gradient by TMA through buffers from `first` on, of 64 columns each."""
    D: gl.constexpr = attention.D
    E: gl.constexpr = attention.E
    x = x.to(bufs.dtype)
    # to shared memory
    if D == 128:
        x, right = split_columns(x, 64, D)
        second_buf = bufs.index(first + 1)
        second_buf.store(right)
    first_buf = bufs.index(first)
    first_buf.store(x)
    if E:
        rest_buf = bufs.index(first + D // 64)
        rest_buf.store(rest.to(bufs.dtype))
    fence_async_shared()
    # from there to memory
    for c in gl.static_range((D + E) // 64):
        here = [b, row, column + 64 * c]
        buf = bufs.index(first + c)
        send_positions(dq_desc, here, buf, 64)


@gluon.jit(do_not_specialize=LAUNCH_NUMBERS)
def attention_dq_hopper(
    k_desc,
    k_rest_desc,
    ds_desc,
    dq_desc,
    dq_sums,
    unit,
    units,
    top,
    end,
    first,
    last,
    first_head,
    heads,
    T,
    H,
    GROUP,
    band,
    scale,
    D: gl.constexpr,
    E: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """dQ of so many units from `unit` on, for a part of their queries: 128 queries a consumer, those that see most keys
    first. Two programs of one consumer fit on a multiprocessor: one is in its prologue or epilogue while the other
    multiplies."""
    attention: gl.constexpr = QueryKind(D, E, STAGES, KEYS, CONSUMERS, CAUSAL)
    # prologue: shared memory and barriers
    kind: gl.constexpr = k_desc.dtype
    k_bufs = swizzled_buffers(kind, STAGES, KEYS, D)
    k_rest_bufs = swizzled_buffers(kind, STAGES, KEYS, E) if E else None
    ds_shape: gl.constexpr = [2 * STAGES * CONSUMERS, KEYS, 64]
    ds_bufs = gl.allocate_shared_memory(kind, ds_shape, ds_desc.layout)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, CONSUMERS)
    bufs = QueryBuffers(k_bufs, k_rest_bufs, ds_bufs, full, empty)
    fence_async_shared()

    # this program's head and query blocks
    part = part_of_launch(top, end, first, last, first_head, heads, CAUSAL)
    blocks = (end - top) // 2
    programs = (blocks + CONSUMERS - 1) // CONSUMERS
    program = gl.program_id(0)
    local, rank = banded_tile(program, units * heads, programs, band)
    kv_head = unit + local // heads
    kv_heads = H // GROUP
    b = kv_head // kv_heads
    g = kv_head % kv_heads
    h = g * GROUP + first_head + local % heads
    m = top // 2 + CONSUMERS * (programs - 1 - rank)
    at = QueryProgram(b, g, h, m, local, part)
    # sums of other launches: the last range ends with the strip's own keys
    has_before = first > 0
    is_last = 2 * last == (end if CAUSAL else T)
    sums_tile = local * (end - top) + 2 * m - top
    carried = CarriedSums(dq_sums, dq_sums, sums_tile, has_before, is_last)
    # consumer warpgroups and one producer warp
    first_queries = (dq_desc, carried, bufs, at, scale, 0, attention)
    second_queries = (dq_desc, carried, bufs, at, scale, 1, attention)
    inputs = (k_desc, k_rest_desc, ds_desc)
    fetched = (inputs, bufs, at, attention)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (accumulate_dq, first_queries),
                (fetch_keys_and_ds, fetched),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (accumulate_dq, first_queries),
                (accumulate_dq, second_queries),
                (fetch_keys_and_ds, fetched),
            ],
            [4, 1],
            [240, 24],
        )
