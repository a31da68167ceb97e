"""Backward of causal attention in Triton, without atomics: one pass over keys for the gradient of queries, one over
queries for those of keys and values. Each sum has one owner and a fixed order, so two runs agree to the bit; cuDNN and
flash add to the queries' gradient from many blocks at once, in whatever order these come. Any GPU; Hopper has kernels
of its own (`backward_hopper.py`), which `attention_backward` prefers.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ = dS K    dK = dS^T Q    dV = P^T dO

B sequences, S positions, H query heads, G key/value heads, D head width; M queries by N keys are worked on at a time.
The blocks of one head run side by side, so that what they read stays in the cache, those with most to do first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.attention.backward_hopper_launch import (
    hopper_backward_applies,
    launch_hopper_backward,
    softmax_statistics,
)
from moefold.kernels.attention.choices import DETERMINISTIC_HEAD_DIMS
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
from moefold.kernels.attention.masked import first_visible_key, visible_until_query
from moefold.kernels.attention.masked_triton import masked_attention_backward
from moefold.kernels.tile_triton import (
    fp32_zeros,
    numbers_from,
    program_block,
    store_inside,
    wide_program_id,
    zero_outside,
)

# M, N, warps, stages: of a dozen tried on an H200 the best for both kernels (docs/benchmarks/step-notes.md).
TILE = (64, 64, 4, 2)
DELTA_ROWS = 64


@triton.jit
def exact_dot(a, b):
    """fp32 is not cut to tf32; 16-bit numbers are multiplied exactly anyway."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_dot(total, a, b):
    """total + a b, with `a` rounded to the type of `b`."""
    rounded = a.to(b.dtype)
    return tl.dot(rounded, b, total, input_precision="ieee")


@triton.jit
def attention_dq_kernel(
    q, k, v, dy, lse, delta, dq,
    S, scale, H, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    v_b, v_s, v_h,
    y_b, y_s, y_h,
    o_b, o_s, o_h,
    D: constexpr, M: constexpr, N: constexpr,
):  # fmt: skip
    """M queries of one head against all keys up to them."""
    # prologue: this program's queries, those with most keys first
    b, h = program_head(H)
    last_block = tl.num_programs(0) - 1
    block = last_block - tl.program_id(0)
    m = block * M
    rows = numbers_from(m, M)
    q_head = q + b * q_b + h * q_h
    queries = load_head_block(q_head, rows, q_s, S, D, D)
    # the gradients of their results, and their statistics
    dy_head = dy + b * y_b + h * y_h
    grads = load_head_block(dy_head, rows, y_s, S, D, D)
    head = wide_program_id(1)
    lse_M = load_log_sums(lse, head, rows, S)
    delta_M = load_delta(delta, head, rows, S)
    log2_scale = scale * LOG2E
    # the head of keys and values
    g = h // GROUP
    k_head = k + b * k_b + g * k_h
    v_head = v + b * v_b + g * v_h
    total = fp32_zeros(M, D)
    # main loop over key blocks
    end = tl.minimum(m + M, S)
    for n in range(0, end, N):
        columns = numbers_from(n, N)
        keys = load_head_block(k_head, columns, k_s, S, D, D)
        values = load_head_block(v_head, columns, v_s, S, D, D)
        # P of this block
        products = exact_dot(queries, keys.T)
        scores = products * log2_scale
        visible = rows[:, None] >= columns[None, :]
        below = scores - lse_M[:, None]
        p = tl.exp2(below)
        p = zero_outside(p, visible)
        # dS = P (dP - delta), and dQ += dS K
        dp = exact_dot(grads, values.T)
        excess = dp - delta_M[:, None]
        ds = p * excess
        total = add_dot(total, ds, keys)
    # epilogue
    dq_head = dq + b * o_b + h * o_h
    of_queries = total * scale
    store_head_block(dq_head, rows, o_s, S, of_queries, D, D)


@triton.jit
def attention_dkdv_kernel(
    q, k, v, dy, lse, delta, dk, dv,
    S, scale, G, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    v_b, v_s, v_h,
    y_b, y_s, y_h,
    o_b, o_s, o_h,
    D: constexpr, M: constexpr, N: constexpr,
):  # fmt: skip
    """N keys and values of one head against all queries from them on, summed over the query heads of the group."""
    # prologue: this program's keys and values
    b, g = program_head(G)
    n = tl.program_id(0) * N
    columns = numbers_from(n, N)
    k_head = k + b * k_b + g * k_h
    keys = load_head_block(k_head, columns, k_s, S, D, D)
    v_head = v + b * v_b + g * v_h
    values = load_head_block(v_head, columns, v_s, S, D, D)
    of_keys = fp32_zeros(N, D)
    of_values = fp32_zeros(N, D)
    log2_scale = scale * LOG2E
    # main loops over the group's query heads and over query blocks
    first_head = g * GROUP
    for h in range(first_head, first_head + GROUP):
        q_head = q + b * q_b + h * q_h
        dy_head = dy + b * y_b + h * y_h
        head = b * G * GROUP + h
        begin = n // M * M
        for m in range(begin, S, M):
            # a block of queries, the gradients of their results, their statistics
            rows = numbers_from(m, M)
            queries = load_head_block(q_head, rows, q_s, S, D, D)
            grads = load_head_block(dy_head, rows, y_s, S, D, D)
            lse_M = load_log_sums(lse, head, rows, S)
            delta_M = load_delta(delta, head, rows, S)
            # P^T of this block, and dV += P^T dO
            products = exact_dot(keys, queries.T)
            scores = products * log2_scale
            visible = rows[None, :] >= columns[:, None]
            below = scores - lse_M[None, :]
            p = tl.exp2(below)
            p = zero_outside(p, visible)
            of_values = add_dot(of_values, p, grads)
            # dS^T = P^T (dP^T - delta), and dK += dS^T Q
            dp = exact_dot(values, grads.T)
            excess = dp - delta_M[None, :]
            ds = p * excess
            of_keys = add_dot(of_keys, ds, queries)
    # epilogue
    out_head = b * o_b + g * o_h
    of_keys = of_keys * scale
    store_head_block(dk + out_head, columns, o_s, S, of_keys, D, D)
    store_head_block(dv + out_head, columns, o_s, S, of_values, D, D)


@triton.jit
def attention_delta_kernel(y, dy, delta, S, H, y_b, y_s, y_h, d_b, d_s, d_h, D: constexpr, M: constexpr):
    """delta = sum(dy * y) per query."""
    b, h = program_head(H)
    rows = program_block(0, M)
    y_head = y + b * y_b + h * y_h
    result = load_head_block(y_head, rows, y_s, S, D, D)
    dy_head = dy + b * d_b + h * d_h
    grads = load_head_block(dy_head, rows, d_s, S, D, D)
    delta_M = row_dots(result, grads)
    delta_head = delta + wide_program_id(1) * S
    inside = rows < S
    store_inside(delta_head + rows, delta_M, inside)


def delta_of_queries(y: Tensor, dy: Tensor) -> Tensor:
    """(B, H, S)."""
    b, s, h, d = y.shape
    delta = y.new_empty(b, h, s, dtype=torch.float32)
    blocks = triton.cdiv(s, DELTA_ROWS)
    strides = outer_strides(y, dy)
    launch = attention_delta_kernel[blocks, b * h]
    launch(y, dy, delta, s, h, *strides, d, DELTA_ROWS)
    return delta


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse_BHS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of square causal attention; all tensors but the log-sum-exp are (B, S, heads, width)."""
    dy = contiguous_heads(dy)
    q = contiguous_heads(q)
    k = contiguous_heads(k)
    v = contiguous_heads(v)
    y = contiguous_heads(y)
    sums = lse_BHS.contiguous()
    b, s, h, d = q.shape
    if hopper_backward_applies(q, k, v, scale):
        statistics = softmax_statistics(y, dy, sums, scale)
        return launch_hopper_backward(dy, q, k, v, statistics, scale)
    square_heads = v.shape[-1] == d
    if not (square_heads and d in DETERMINISTIC_HEAD_DIMS):
        return backward_of_any_width(dy, q, k, v, y, sums, scale)
    delta = delta_of_queries(y, dy)
    g = k.shape[2]
    group = h // g
    dq, dk, dv = empty_gradients(q, k, v)
    heads = (q, k, v, dy)
    inputs = (*heads, sums, delta)
    tile = TileOptions(*TILE)
    options = tile._asdict()
    # one pass over keys
    strides = outer_strides(*heads, dq)
    query_blocks = triton.cdiv(s, tile.M)
    launch = attention_dq_kernel[query_blocks, b * h]
    sizes = (s, scale, h, group)
    launch(*inputs, dq, *sizes, *strides, D=d, **options)
    # one pass over queries
    strides = outer_strides(*heads, dk)
    key_blocks = triton.cdiv(s, tile.N)
    launch = attention_dkdv_kernel[key_blocks, b * g]
    sizes = (s, scale, g, group)
    launch(*inputs, dk, dv, *sizes, *strides, D=d, **options)
    return dq, dk, dv


def backward_of_any_width(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse_BHS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the kernels for masked attention, where all keys from the first on are visible: keys and values may
    have any width, and other ones than each other."""
    first_BS = first_visible_key(q, 0, 0, None)
    keys = k.shape[1]
    until_BL = visible_until_query(first_BS, keys)
    delta = torch.empty_like(lse_BHS)
    heads = (dy, q, k, v)
    ranges = (first_BS, until_BL)
    return masked_attention_backward(*heads, *ranges, y, lse_BHS, delta, scale, ahead=0)
