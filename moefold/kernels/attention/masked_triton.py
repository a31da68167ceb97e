"""Masked attention in Triton: a query sees a range of keys that ends with its own (a document, a window, or both). Key
blocks that no query of a block sees are not read, forward or backward. Each sum has one owner and a fixed order, so two
runs agree to the bit. `masked.py` defines `first` and `until`. Imported only where Triton is.

B sequences, S queries, L keys, H query heads, G key/value heads, D width of keys, V of values, each in blocks of a
power of two; M queries by N keys are worked on at a time. The first query is `ahead` positions behind the first key.
Scores are to the base of two. A query sees keys from the latest of three on: the first there is, the first of its
`window`, and, where documents are given, begins + `shift`.

Blocks of ring attention go into what is there (SUMS): results are merged into those of earlier blocks, unless `fresh`,
and gradients added. Programs whose queries or keys see nothing end at once, without touching memory. There a program of
keys has one query head: those of a group add one after the other, in order (`turns`).
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.attention.heads_triton import (
    LOG2E,
    TileOptions,
    contiguous_heads,
    empty_gradients,
    head_block,
    load_delta,
    load_head_block,
    load_log_sums,
    outer_strides,
    program_head,
    row_dots,
    store_head_block,
)
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_or_zero,
    numbers_from,
    store_inside,
    wide_program_id,
    zero_outside,
)

# Of a dozen tried on an H200 the best (docs/benchmarks/step-notes.md).
NARROW = (
    TileOptions(64, 64, 4, 3),
    TileOptions(64, 64, 4, 2),
    TileOptions(64, 64, 4, 2),
)
WIDE = (  # heads wider than 128
    TileOptions(128, 64, 8, 2),
    TileOptions(64, 64, 4, 2),
    TileOptions(32, 128, 8, 2),
)
FORWARD, DQ, DKDV = range(3)  # places in these
NO_WINDOW = 1 << 30  # positions
TURN_HEADS = 1  # query heads of a program that adds to sums: more programs than key blocks, where few queries see them


@triton.jit
def first_visible(begins, begins_b, b, rows, S, L, ahead, shift, window):
    """The first key that each of these queries sees; behind the end, queries see none."""
    inside = rows < S
    first = tl.maximum(rows + ahead - window + 1, 0)
    if begins is not None:
        at = begins + b * begins_b + rows
        begin = load_or_zero(at, inside)
        first = tl.maximum(first, begin + shift)
    return tl.where(inside, first, L)


@triton.jit
def visible_until(begins, begins_b, b, columns, S, ahead, shift, window, steps):
    """For each key, the number of queries whose first visible key is not behind it, by a search among the begins."""
    until = tl.minimum(columns - ahead + window, S)
    if begins is not None:
        low = columns * 0
        high = low + S
        for _ in range(steps):
            middle = (low + high) // 2
            searched = low < high
            begin = load_or_zero(begins + b * begins_b + middle, searched)
            sees = searched & (begin + shift <= columns)
            low = tl.where(sees, middle + 1, low)
            high = tl.where(searched & (begin + shift > columns), middle, high)
        until = tl.minimum(until, low)
    return until


@triton.jit
def await_turn(turns, mine):
    """Until programs before this one have added what they have."""
    turn = tl.atomic_add(turns, 0, sem="acquire", scope="gpu")
    while turn != mine:
        turn = tl.atomic_add(turns, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def pass_turn(turns, mine):
    tl.debug_barrier()
    tl.atomic_xchg(turns, mine + 1, sem="release", scope="gpu")


@triton.jit
def add_head_block(base, places, stride, end, values, D: constexpr, WIDE: constexpr):
    """Add to a sum that other multiprocessors may have written: read from the cache that all share."""
    pointers, inside = head_block(base, places, stride, end, D, WIDE)
    old = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
    store_inside(pointers, old + values, inside)


@triton.jit
def visible_keys(rows, columns, first_M, ahead, L):
    """(M, N): which keys a query sees, from its first to its own or the last there is."""
    key = columns[None, :]
    own = rows + ahead
    last = tl.minimum(own, L - 1)
    not_before = key >= first_M[:, None]
    not_behind = key <= last[:, None]
    return not_before & not_behind


@triton.jit(do_not_specialize=["fresh"])
def masked_attention_kernel(
    q,
    k,
    v,
    begins,
    sink,
    y,
    lse,
    S,
    L,
    ahead,
    shift,
    window,
    fresh,
    scale,
    H,
    GROUP,
    begins_b,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    y_b,
    y_s,
    y_h,
    l_b,
    l_h,
    SINK: constexpr,
    SUMS: constexpr,
    D: constexpr,
    DW: constexpr,
    V: constexpr,
    VW: constexpr,
    M: constexpr,
    N: constexpr,
):
    """M queries of one head, with an online softmax over their keys."""
    # prologue: this program's queries
    b, h = program_head(H)
    start = tl.program_id(0) * M
    rows = numbers_from(start, M)
    first_M = first_visible(begins, begins_b, b, rows, S, L, ahead, shift, window)
    lowest = tl.min(first_M, 0)
    end = tl.minimum(start + M + ahead, L)
    if SUMS:  # noqa: SIM102, decided when compiled
        if (lowest >= end) & (fresh == 0):
            return
    q_head = q + b * q_b + h * q_h
    queries = load_head_block(q_head, rows, q_s, S, D, DW)
    log2_scale = scale * LOG2E
    # the softmax so far: maximum, sum and weighted values; a sink is in it from the start
    total = tl.zeros((M,), tl.float32)
    top = total - float("inf")
    if SINK:
        sink_logit = tl.load(sink + h)
        sink_logit = sink_logit.to(tl.float32)
        top = total + sink_logit * LOG2E
        total += 1.0
    out = fp32_zeros(M, VW)
    # the head of keys and values
    g = h // GROUP
    k_head = k + b * k_b + g * k_h
    v_head = v + b * v_b + g * v_h
    # main loop over key blocks, from the first that any query sees
    begin = lowest // N * N
    for n in range(begin, end, N):
        # scores of this block of keys
        columns = numbers_from(n, N)
        keys = load_head_block(k_head, columns, k_s, L, D, DW)
        products = tl.dot(queries, keys.T)
        scores = products * log2_scale
        visible = visible_keys(rows, columns, first_M, ahead, L)
        scores = tl.where(visible, scores, float("-inf"))
        # the new maximum, and what it leaves of the old sums
        block_top = tl.max(scores, 1)
        higher = tl.maximum(top, block_top)
        unseen = higher == float("-inf")  # a query that has seen no key yet
        reference = tl.where(unseen, 0.0, higher)
        below = scores - reference[:, None]
        p = tl.exp2(below)
        kept = tl.exp2(top - reference)
        # weighted values and sum
        values = load_head_block(v_head, columns, v_s, L, V, VW)
        kept_out = out * kept[:, None]
        weights = p.to(values.dtype)
        out = tl.dot(weights, values, kept_out)
        kept_total = total * kept
        total = kept_total + tl.sum(p, 1)
        top = higher
    # epilogue: add what earlier blocks have, as one key more
    y_head = y + b * y_b + h * y_h
    lse_head = lse + b * l_b + h * l_h
    inside = rows < S
    if SUMS:
        old = tl.load(lse_head + rows, mask=inside, other=float("-inf"))
        old_top = old * LOG2E
        higher = tl.maximum(top, old_top)
        unseen = higher == float("-inf")
        reference = tl.where(unseen, 0.0, higher)
        old_share = tl.exp2(old_top - reference)
        share = tl.exp2(top - reference)
        total = total * share + old_share
        top = higher
        places = tl.where(fresh == 0, S, 0)  # nothing is read of results that are not there yet
        before = load_head_block(y_head, rows, y_s, places, V, VW)
        out = out * share[:, None] + before * old_share[:, None]
    # normalise; a query that saw no key has zeros and minus infinity
    saw_none = total == 0.0
    total = tl.where(saw_none, 1.0, total)
    normalised = out / total[:, None]
    store_head_block(y_head, rows, y_s, S, normalised, V, VW)
    log2_sum = top + tl.log2(total)
    lse_M = log2_sum / LOG2E
    if SUMS:
        tl.debug_barrier()  # all warps have read what one of them now writes
    store_inside(lse_head + rows, lse_M, inside)


@triton.jit(do_not_specialize=["fresh"])
def masked_attention_dq_kernel(
    q,
    k,
    v,
    dy,
    begins,
    y,
    lse,
    delta,
    dq,
    S,
    L,
    ahead,
    shift,
    window,
    fresh,
    scale,
    H,
    GROUP,
    begins_b,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    d_b,
    d_s,
    d_h,
    y_b,
    y_s,
    y_h,
    o_b,
    o_s,
    o_h,
    l_b,
    l_h,
    DELTA: constexpr,
    SUMS: constexpr,
    D: constexpr,
    DW: constexpr,
    V: constexpr,
    VW: constexpr,
    M: constexpr,
    N: constexpr,
):
    """The gradient of M queries of one head; and, unless DELTA is given, delta = sum(dy * y) per query, for the kernel
    that follows."""
    # prologue: this program's queries and the gradients of their results
    b, h = program_head(H)
    start = tl.program_id(0) * M
    rows = numbers_from(start, M)
    first_M = first_visible(begins, begins_b, b, rows, S, L, ahead, shift, window)
    lowest = tl.min(first_M, 0)
    end = tl.minimum(start + M + ahead, L)
    if SUMS:  # noqa: SIM102, decided when compiled
        if (lowest >= end) & (fresh == 0):
            return
    q_head = q + b * q_b + h * q_h
    queries = load_head_block(q_head, rows, q_s, S, D, DW)
    dy_head = dy + b * d_b + h * d_h
    grads = load_head_block(dy_head, rows, d_s, S, V, VW)
    # statistics of the queries
    head = b * l_b + h * l_h
    delta_head = delta + head
    if DELTA:
        delta_M = load_delta(delta_head, 0, rows, S)
    else:
        y_head = y + b * y_b + h * y_h
        result = load_head_block(y_head, rows, y_s, S, V, VW)
        delta_M = row_dots(result, grads)
        inside = rows < S
        store_inside(delta_head + rows, delta_M, inside)
    lse_M = load_log_sums(lse + head, 0, rows, S)
    log2_scale = scale * LOG2E
    # the head of keys and values
    g = h // GROUP
    k_head = k + b * k_b + g * k_h
    v_head = v + b * v_b + g * v_h
    total = fp32_zeros(M, DW)
    # main loop over key blocks, from the first that any query sees
    begin = lowest // N * N
    for n in range(begin, end, N):
        columns = numbers_from(n, N)
        keys = load_head_block(k_head, columns, k_s, L, D, DW)
        values = load_head_block(v_head, columns, v_s, L, V, VW)
        # P of this block
        products = tl.dot(queries, keys.T)
        scores = products * log2_scale
        visible = visible_keys(rows, columns, first_M, ahead, L)
        below = scores - lse_M[:, None]
        p = tl.exp2(below)
        p = zero_outside(p, visible)
        # dS = P (dP - delta), and dQ += dS K
        dp = tl.dot(grads, values.T)
        excess = dp - delta_M[:, None]
        ds = p * excess
        rounded = ds.to(keys.dtype)
        total = tl.dot(rounded, keys, total)
    # epilogue
    dq_head = dq + b * o_b + h * o_h
    of_queries = total * scale
    if SUMS:
        places = tl.where(fresh == 0, S, 0)
        of_queries += load_head_block(dq_head, rows, o_s, places, D, DW)
    store_head_block(dq_head, rows, o_s, S, of_queries, D, DW)


@triton.jit
def masked_attention_dkdv_kernel(
    q,
    k,
    v,
    dy,
    begins,
    until,
    lse,
    delta,
    dk,
    dv,
    turns,
    S,
    L,
    ahead,
    shift,
    window,
    steps,
    scale,
    G,
    GROUP,
    HEADS,
    begins_b,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    d_b,
    d_s,
    d_h,
    ok_b,
    ok_s,
    ok_h,
    ov_b,
    ov_s,
    ov_h,
    l_b,
    l_h,
    SUMS: constexpr,
    D: constexpr,
    DW: constexpr,
    V: constexpr,
    VW: constexpr,
    M: constexpr,
    N: constexpr,
):
    """The gradients of N keys and values of one head, summed over HEADS query heads of its group."""
    # prologue: this program's keys, and the queries that see them: from those at the first key to the last key's last
    b, g = program_head(G)
    start = tl.program_id(0) * N
    columns = numbers_from(start, N)
    behind = tl.minimum(start + N, L)
    first_row = tl.maximum(start - ahead, 0)
    if SUMS:
        earliest = first_visible(begins, begins_b, b, first_row, S, L, ahead, shift, window)
        if earliest >= behind:
            return
    if until is not None:
        until_N = load_or_zero(until + b * L + columns, columns < L)
    else:
        until_N = visible_until(begins, begins_b, b, columns, S, ahead, shift, window, steps)
        until_N = tl.where(columns < L, until_N, 0)
    end = tl.max(until_N, 0)
    lowest = first_row // M * M
    k_head = k + b * k_b + g * k_h
    keys = load_head_block(k_head, columns, k_s, L, D, DW)
    v_head = v + b * v_b + g * v_h
    values = load_head_block(v_head, columns, v_s, L, V, VW)
    of_keys = fp32_zeros(N, DW)
    of_values = fp32_zeros(N, VW)
    log2_scale = scale * LOG2E
    # main loops over query heads and over query blocks
    place = wide_program_id(2)
    first_head = g * GROUP + place * HEADS
    for h in range(first_head, first_head + HEADS):
        q_head = q + b * q_b + h * q_h
        dy_head = dy + b * d_b + h * d_h
        head = b * l_b + h * l_h
        lse_head = lse + head
        delta_head = delta + head
        for m in range(lowest, end, M):
            # a block of queries, the gradients of their results, their statistics
            rows = numbers_from(m, M)
            queries = load_head_block(q_head, rows, q_s, S, D, DW)
            grads = load_head_block(dy_head, rows, d_s, S, V, VW)
            lse_M = load_log_sums(lse_head, 0, rows, S)
            delta_M = load_delta(delta_head, 0, rows, S)
            # P^T of this block, and dV += P^T dO
            products = tl.dot(keys, queries.T)
            scores = products * log2_scale
            row = rows[None, :]
            not_later = columns[:, None] <= row + ahead
            not_behind = row < until_N[:, None]
            visible = not_later & not_behind
            below = scores - lse_M[None, :]
            p = tl.exp2(below)
            p = zero_outside(p, visible)
            weights = p.to(grads.dtype)
            of_values = tl.dot(weights, grads, of_values)
            # dS^T = P^T (dP^T - delta), and dK += dS^T Q
            dp = tl.dot(values, grads.T)
            excess = dp - delta_M[None, :]
            ds = p * excess
            rounded = ds.to(queries.dtype)
            of_keys = tl.dot(rounded, queries, of_keys)
    # epilogue
    dk_head = dk + b * ok_b + g * ok_h
    scaled = of_keys * scale
    dv_head = dv + b * ov_b + g * ov_h
    if SUMS:
        mine = tl.program_id(2)
        turn = turns + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        await_turn(turn, mine)
        add_head_block(dk_head, columns, ok_s, L, scaled, D, DW)
        add_head_block(dv_head, columns, ov_s, L, of_values, V, VW)
        pass_turn(turn, mine)
    else:
        store_head_block(dk_head, columns, ok_s, L, scaled, D, DW)
        store_head_block(dv_head, columns, ov_s, L, of_values, V, VW)


def padded_width(x: Tensor) -> int:
    """The power of two that holds the width of a head."""
    width = x.shape[-1]
    power = triton.next_power_of_2(width)
    return max(16, power)


def padded_widths(q_BSHD: Tensor, v_BLGV: Tensor) -> list[int]:
    """D and V, each with the power of two that holds it."""
    d = q_BSHD.shape[-1]
    dw = padded_width(q_BSHD)
    v = v_BLGV.shape[-1]
    vw = padded_width(v_BLGV)
    return [d, dw, v, vw]


def tile_options(kernel: int, widths: list[int]) -> TileOptions:
    """Those of one of the three kernels."""
    is_wide = max(widths) > 128
    tiles = WIDE if is_wide else NARROW
    return tiles[kernel]


class Visible(NamedTuple):
    """The keys that queries see: how far ahead the first query stands, the window, and (B, S) begins, which count from
    `shift` positions before the first key."""

    ahead: int
    window: int = 0
    begins_BS: Tensor | None = None
    shift: int = 0

    def numbers(self) -> tuple[int, int, int]:
        window = self.window or NO_WINDOW
        return self.ahead, self.shift, window

    def begins_stride(self) -> int:
        return 0 if self.begins_BS is None else self.begins_BS.stride(0)


def masked_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_BS: Tensor,
    sink_H: Tensor | None,
    scale: float,
    ahead: int,
) -> tuple[Tensor, Tensor]:
    """(B, S, H, V) and its log-sum-exp (B, H, S), sinks included."""
    b, s, h, _ = q.shape
    width = v.shape[-1]
    y = q.new_empty(b, s, h, width)
    lse = q.new_empty(b, h, s, dtype=torch.float32)
    visible = Visible(ahead, 0, first_BS)
    launch_forward(q, k, v, visible, sink_H, y, lse, scale, sums=False, fresh=True)
    return y, lse


def merge_masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    out: Tensor,
    lse: Tensor,
    scale: float,
    fresh: bool,
) -> None:
    """Attention to some more keys, into the fp32 result and log-sum-exp of earlier ones; if `fresh`, `out` is not
    read."""
    launch_forward(q, k, v, visible, None, out, lse, scale, sums=True, fresh=fresh)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    sink_H: Tensor | None,
    y: Tensor,
    lse: Tensor,
    scale: float,
    sums: bool,
    fresh: bool,
) -> None:
    b, s, h, _ = q.shape
    _, length, g, _ = k.shape
    group = h // g
    q = contiguous_heads(q)
    k = contiguous_heads(k)
    v = contiguous_heads(v)
    tensors = (q, k, v, visible.begins_BS, sink_H, y, lse)
    sizes = (s, length, *visible.numbers(), int(fresh), scale, h, group, visible.begins_stride())
    strides = outer_strides(q, k, v, y)
    l_b, l_h, _ = lse.stride()
    widths = padded_widths(q, v)
    options = tile_options(FORWARD, widths)
    query_blocks = triton.cdiv(s, options.M)
    has_sink = sink_H is not None
    launch = masked_attention_kernel[query_blocks, b * h]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, l_b, l_h, has_sink, sums, *widths, **tile)


class AttentionGradients(NamedTuple):
    """dq, dk and dv: empty memory, or sums in fp32 to be added to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def masked_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_BS: Tensor,
    until_BL: Tensor,
    y: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. `delta` (B, H, S) is an output where the result `y` is given, else an input."""
    found = AttentionGradients(*empty_gradients(q, k, v))
    visible = Visible(ahead, 0, first_BS)
    heads = (dy, q, k, v)
    statistics = (y, lse, delta)
    launch_dq(*heads, visible, *statistics, found, scale, sums=False, fresh=True)
    launch_dkdv(*heads, visible, until_BL, lse, delta, found, scale, turns=None)
    return found


def add_masked_gradients(
    found: AttentionGradients,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    y: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    fresh: bool,
) -> None:
    """The same, added to sums in fp32; if `fresh`, that of dq is written."""
    heads = (dy, q, k, v)
    launch_dq(*heads, visible, y, lse, delta, found, scale, sums=True, fresh=fresh)
    options = tile_options(DKDV, padded_widths(q, v))
    b, length, g, _ = k.shape
    key_blocks = triton.cdiv(length, options.N)
    turns = q.new_zeros(b * g * key_blocks, dtype=torch.int32)
    launch_dkdv(*heads, visible, None, lse, delta, found, scale, turns)


def launch_dq(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    y: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    found: AttentionGradients,
    scale: float,
    sums: bool,
    fresh: bool,
) -> None:
    """dq, and delta where the result is given."""
    b, s, h, _ = q.shape
    _, length, g, _ = k.shape
    group = h // g
    inputs = tuple(map(contiguous_heads, (q, k, v, dy)))
    has_delta = y is None
    y = inputs[-1] if y is None else contiguous_heads(y)
    widths = padded_widths(q, v)
    tensors = (*inputs, visible.begins_BS, y, lse, delta, found.dq)
    sizes = (s, length, *visible.numbers(), int(fresh), scale, h, group, visible.begins_stride())
    strides = outer_strides(*inputs, y, found.dq)
    options = tile_options(DQ, widths)
    query_blocks = triton.cdiv(s, options.M)
    launch = masked_attention_dq_kernel[query_blocks, b * h]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, *statistics_strides(lse, delta), has_delta, sums, *widths, **tile)


def launch_dkdv(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible,
    until_BL: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    found: AttentionGradients,
    scale: float,
    turns: Tensor | None,
) -> None:
    b, s, h, _ = q.shape
    _, length, g, _ = k.shape
    group = h // g
    sums = turns is not None
    heads = gcd(group, TURN_HEADS) if sums else group
    inputs = tuple(map(contiguous_heads, (q, k, v, dy)))
    widths = padded_widths(q, v)
    tensors = (*inputs, visible.begins_BS, until_BL, lse, delta, found.dk, found.dv, turns)
    search_steps = s.bit_length()
    sizes = (s, length, *visible.numbers(), search_steps, scale, g, group, heads, visible.begins_stride())
    strides = outer_strides(*inputs, found.dk, found.dv)
    options = tile_options(DKDV, widths)
    key_blocks = triton.cdiv(length, options.N)
    launch = masked_attention_dkdv_kernel[key_blocks, b * g, group // heads]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, *statistics_strides(lse, delta), sums, *widths, **tile)


def statistics_strides(lse: Tensor, delta: Tensor) -> tuple[int, int]:
    """Of sequences and heads, which both have; positions lie side by side."""
    strides = lse.stride()
    for size, one, other in zip(lse.shape, strides, delta.stride(), strict=True):
        assert size == 1 or one == other, "the log-sum-exp and delta lie in memory alike"
    return strides[0], strides[1]
