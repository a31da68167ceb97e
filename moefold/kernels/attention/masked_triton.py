"""Masked attention in Triton: a query sees a range of keys that ends with its own (a document, a window, or both). Key
blocks that no query of a block sees are not read, forward or backward. Each sum has one owner and a fixed order, so two
runs agree to the bit. `masked.py` defines `first` and `until`. Imported only where Triton is.

B sequences, S queries, L keys, H query heads, G key/value heads, D width of keys, V of values, each in blocks of a
power of two; M queries by N keys are worked on at a time. The first query is `ahead` positions behind the first key.
Scores are to the base of two.
"""

from __future__ import annotations

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


@triton.jit
def first_visible(first, b, rows, S, L):
    """The first key that each of these queries sees; behind the end, queries see none."""
    at = first + b * S + rows
    inside = rows < S
    return tl.load(at, mask=inside, other=L)


@triton.jit
def visible_keys(rows, columns, first_M, ahead, L):
    """(M, N): which keys a query sees, from its first to its own or the last there is."""
    key = columns[None, :]
    own = rows + ahead
    last = tl.minimum(own, L - 1)
    not_before = key >= first_M[:, None]
    not_behind = key <= last[:, None]
    return not_before & not_behind


@triton.jit
def masked_attention_kernel(
    q, k, v, first, sink, y, lse,
    S, L, ahead, scale, H, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    v_b, v_s, v_h,
    y_b, y_s, y_h,
    SINK: constexpr,
    D: constexpr, DW: constexpr,
    V: constexpr, VW: constexpr,
    M: constexpr, N: constexpr,
):  # fmt: skip
    """M queries of one head, with an online softmax over their keys."""
    # prologue: this program's queries
    b, h = program_head(H)
    start = tl.program_id(0) * M
    rows = numbers_from(start, M)
    q_head = q + b * q_b + h * q_h
    queries = load_head_block(q_head, rows, q_s, S, D, DW)
    first_M = first_visible(first, b, rows, S, L)
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
    # the head of keys and values, and the keys that any of the queries sees
    g = h // GROUP
    k_head = k + b * k_b + g * k_h
    v_head = v + b * v_b + g * v_h
    lowest = tl.load(first + b * S + start)
    end = tl.minimum(start + M + ahead, L)
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
        shift = tl.where(unseen, 0.0, higher)
        below = scores - shift[:, None]
        p = tl.exp2(below)
        kept = tl.exp2(top - shift)
        # weighted values and sum
        values = load_head_block(v_head, columns, v_s, L, V, VW)
        kept_out = out * kept[:, None]
        weights = p.to(values.dtype)
        out = tl.dot(weights, values, kept_out)
        kept_total = total * kept
        total = kept_total + tl.sum(p, 1)
        top = higher
    # epilogue: normalise; a query that saw no key has zeros and minus infinity
    y_head = y + b * y_b + h * y_h
    saw_none = total == 0.0
    total = tl.where(saw_none, 1.0, total)
    normalised = out / total[:, None]
    store_head_block(y_head, rows, y_s, S, normalised, V, VW)
    log2_sum = top + tl.log2(total)
    lse_M = log2_sum / LOG2E
    lse_head = lse + wide_program_id(1) * S
    inside = rows < S
    store_inside(lse_head + rows, lse_M, inside)


@triton.jit
def masked_attention_dq_kernel(
    q, k, v, dy, first, y, lse, delta, dq,
    S, L, ahead, scale, H, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    v_b, v_s, v_h,
    d_b, d_s, d_h,
    y_b, y_s, y_h,
    o_b, o_s, o_h,
    DELTA: constexpr,
    D: constexpr, DW: constexpr,
    V: constexpr, VW: constexpr,
    M: constexpr, N: constexpr,
):  # fmt: skip
    """The gradient of M queries of one head; and, unless DELTA is given, delta = sum(dy * y) per query, for the kernel
    that follows."""
    # prologue: this program's queries and the gradients of their results
    b, h = program_head(H)
    head = wide_program_id(1)
    start = tl.program_id(0) * M
    rows = numbers_from(start, M)
    q_head = q + b * q_b + h * q_h
    queries = load_head_block(q_head, rows, q_s, S, D, DW)
    dy_head = dy + b * d_b + h * d_h
    grads = load_head_block(dy_head, rows, d_s, S, V, VW)
    # statistics of the queries
    if DELTA:
        delta_M = load_delta(delta, head, rows, S)
    else:
        y_head = y + b * y_b + h * y_h
        result = load_head_block(y_head, rows, y_s, S, V, VW)
        delta_M = row_dots(result, grads)
        delta_head = delta + head * S
        inside = rows < S
        store_inside(delta_head + rows, delta_M, inside)
    lse_M = load_log_sums(lse, head, rows, S)
    first_M = first_visible(first, b, rows, S, L)
    log2_scale = scale * LOG2E
    # the head of keys and values, and the keys that any of the queries sees
    g = h // GROUP
    k_head = k + b * k_b + g * k_h
    v_head = v + b * v_b + g * v_h
    total = fp32_zeros(M, DW)
    lowest = tl.load(first + b * S + start)
    end = tl.minimum(start + M + ahead, L)
    # main loop over key blocks
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
    store_head_block(dq_head, rows, o_s, S, of_queries, D, DW)


@triton.jit
def masked_attention_dkdv_kernel(
    q, k, v, dy, until, lse, delta, dk, dv,
    S, L, ahead, scale, G, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    v_b, v_s, v_h,
    d_b, d_s, d_h,
    ok_b, ok_s, ok_h,
    ov_b, ov_s, ov_h,
    D: constexpr, DW: constexpr,
    V: constexpr, VW: constexpr,
    M: constexpr, N: constexpr,
):  # fmt: skip
    """The gradients of N keys and values of one head, summed over the query heads of its group."""
    # prologue: this program's keys and values
    b, g = program_head(G)
    start = tl.program_id(0) * N
    columns = numbers_from(start, N)
    k_head = k + b * k_b + g * k_h
    keys = load_head_block(k_head, columns, k_s, L, D, DW)
    v_head = v + b * v_b + g * v_h
    values = load_head_block(v_head, columns, v_s, L, V, VW)
    of_keys = fp32_zeros(N, DW)
    of_values = fp32_zeros(N, VW)
    log2_scale = scale * LOG2E
    # the queries that see them: from those at the first key to the last key's last
    first_row = tl.maximum(start - ahead, 0)
    lowest = first_row // M * M
    until_b = until + b * L
    until_N = load_or_zero(until_b + columns, columns < L)
    behind = tl.minimum(start + N, L)
    end = tl.load(until_b + behind - 1)
    # main loops over the group's query heads and over query blocks
    first_head = g * GROUP
    for h in range(first_head, first_head + GROUP):
        q_head = q + b * q_b + h * q_h
        dy_head = dy + b * d_b + h * d_h
        head = b * G * GROUP + h
        for m in range(lowest, end, M):
            # a block of queries, the gradients of their results, their statistics
            rows = numbers_from(m, M)
            queries = load_head_block(q_head, rows, q_s, S, D, DW)
            grads = load_head_block(dy_head, rows, d_s, S, V, VW)
            lse_M = load_log_sums(lse, head, rows, S)
            delta_M = load_delta(delta, head, rows, S)
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
    store_head_block(dk_head, columns, ok_s, L, scaled, D, DW)
    dv_head = dv + b * ov_b + g * ov_h
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
    _, length, g, _ = k.shape
    group = h // g
    q = contiguous_heads(q)
    k = contiguous_heads(k)
    v = contiguous_heads(v)
    width = v.shape[-1]
    y = q.new_empty(b, s, h, width)
    lse = q.new_empty(b, h, s, dtype=torch.float32)
    tensors = (q, k, v, first_BS, sink_H, y, lse)
    sizes = (s, length, ahead, scale, h, group)
    strides = outer_strides(q, k, v, y)
    widths = padded_widths(q, v)
    options = tile_options(FORWARD, widths)
    query_blocks = triton.cdiv(s, options.M)
    has_sink = sink_H is not None
    launch = masked_attention_kernel[query_blocks, b * h]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, has_sink, *widths, **tile)
    return y, lse


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
    b, s, h, _ = q.shape
    _, length, g, _ = k.shape
    group = h // g
    dq, dk, dv = empty_gradients(q, k, v)
    q = contiguous_heads(q)
    k = contiguous_heads(k)
    v = contiguous_heads(v)
    dy = contiguous_heads(dy)
    inputs = (q, k, v, dy)
    has_delta = y is None
    y = dy if y is None else contiguous_heads(y)
    widths = padded_widths(q, v)
    # dq and delta
    tensors = (*inputs, first_BS, y, lse, delta, dq)
    sizes = (s, length, ahead, scale, h, group)
    strides = outer_strides(*inputs, y, dq)
    options = tile_options(DQ, widths)
    query_blocks = triton.cdiv(s, options.M)
    launch = masked_attention_dq_kernel[query_blocks, b * h]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, has_delta, *widths, **tile)
    # dk and dv
    tensors = (*inputs, until_BL, lse, delta, dk, dv)
    sizes = (s, length, ahead, scale, g, group)
    strides = outer_strides(*inputs, dk, dv)
    options = tile_options(DKDV, widths)
    key_blocks = triton.cdiv(length, options.N)
    launch = masked_attention_dkdv_kernel[key_blocks, b * g]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, *widths, **tile)
    return dq, dk, dv
