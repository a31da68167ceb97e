"""Backward of causal attention in Triton, without atomics: one pass over keys for the gradient of queries, one over
queries for those of keys and values. Each sum has one owner and a fixed order, so two runs agree to the bit; cuDNN and
flash add to the queries' gradient from many blocks at once, in whatever order these come.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ = dS K    dK = dS^T Q    dV = P^T dO

B sequences, S positions, H query heads, G key/value heads, D head width. Scores are scaled and in powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def block_at(start, base, stride_s, rows, S, D: tl.constexpr):
    """(rows, D) of one head, zeros behind the end."""
    offsets = start + rows
    pointers = base + offsets[:, None] * stride_s + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=offsets[:, None] < S, other=0.0)


@triton.jit
def dq_kernel(
    q, k, v, dy, lse, delta, dq, S, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head against all keys before them."""
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # those with most keys first
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    queries = block_at(m, q + b.to(tl.int64) * q_b + h * q_h, q_s, rows, S, D)
    grads = block_at(m, dy + b.to(tl.int64) * y_b + h * y_h, y_s, rows, S, D)
    statistics = tl.program_id(1).to(tl.int64) * S + m + rows
    lse_M = tl.load(lse + statistics, mask=m + rows < S, other=float("inf")) * 1.4426950408889634
    delta_M = tl.load(delta + statistics, mask=m + rows < S, other=0.0)
    keys_at = k + b.to(tl.int64) * k_b + (h // GROUP) * k_h
    values_at = v + b.to(tl.int64) * v_b + (h // GROUP) * v_h
    total = tl.zeros((M, D), dtype=tl.float32)
    for n in range(0, tl.minimum(m + M, S), N):
        keys = block_at(n, keys_at, k_s, columns, S, D)
        values = block_at(n, values_at, v_s, columns, S, D)
        scores = tl.dot(queries, keys.T) * (scale * 1.4426950408889634)
        p = tl.where(m + rows[:, None] >= n + columns[None, :], tl.exp2(scores - lse_M[:, None]), 0.0)
        ds = p * (tl.dot(grads, values.T) - delta_M[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total)
    here = dq + b.to(tl.int64) * o_b + h * o_h + (m + rows)[:, None] * o_s + tl.arange(0, D)[None, :]
    tl.store(here, (total * scale).to(dq.dtype.element_ty), mask=m + rows[:, None] < S)


@triton.jit
def dkdv_kernel(
    q, k, v, dy, lse, delta, dk, dv, S, scale, G, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N keys and values of one head against all queries behind them, of every query head of the group in turn."""
    n = tl.program_id(0) * N  # those with most queries first
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    keys = block_at(n, k + b.to(tl.int64) * k_b + g * k_h, k_s, columns, S, D)
    values = block_at(n, v + b.to(tl.int64) * v_b + g * v_h, v_s, columns, S, D)
    of_keys = tl.zeros((N, D), dtype=tl.float32)
    of_values = tl.zeros((N, D), dtype=tl.float32)
    for h in range(g * GROUP, (g + 1) * GROUP):
        queries_at, grads_at = q + b.to(tl.int64) * q_b + h * q_h, dy + b.to(tl.int64) * y_b + h * y_h
        first = (b * G * GROUP + h).to(tl.int64) * S
        for m in range(n // M * M, S, M):
            queries = block_at(m, queries_at, q_s, rows, S, D)
            grads = block_at(m, grads_at, y_s, rows, S, D)
            lse_M = tl.load(lse + first + m + rows, mask=m + rows < S, other=float("inf")) * 1.4426950408889634
            delta_M = tl.load(delta + first + m + rows, mask=m + rows < S, other=0.0)
            scores = tl.dot(keys, queries.T) * (scale * 1.4426950408889634)
            p = tl.where(m + rows[None, :] >= n + columns[:, None], tl.exp2(scores - lse_M[None, :]), 0.0)
            of_values = tl.dot(p.to(grads.dtype), grads, of_values)
            ds = p * (tl.dot(values, grads.T) - delta_M[None, :])
            of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys)
    here = b.to(tl.int64) * o_b + g * o_h + (n + columns)[:, None] * o_s + tl.arange(0, D)[None, :]
    tl.store(dk + here, (of_keys * scale).to(dk.dtype.element_ty), mask=n + columns[:, None] < S)
    tl.store(dv + here, of_values.to(dv.dtype.element_ty), mask=n + columns[:, None] < S)


@triton.jit
def delta_kernel(y, dy, delta, S, H, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr, M: tl.constexpr):
    """For each query, the sum of its result times the result's gradient."""
    m, b, h = tl.program_id(0) * M, tl.program_id(1) // H, tl.program_id(1) % H
    rows = tl.arange(0, M)
    result = block_at(m, y + b.to(tl.int64) * y_b + h * y_h, y_s, rows, S, D).to(tl.float32)
    grads = block_at(m, dy + b.to(tl.int64) * d_b + h * d_h, d_s, rows, S, D).to(tl.float32)
    tl.store(delta + tl.program_id(1).to(tl.int64) * S + m + rows, tl.sum(result * grads, 1), mask=m + rows < S)


def outer_strides(x_BSHD: torch.Tensor) -> tuple[int, int, int]:
    return x_BSHD.stride(0), x_BSHD.stride(1), x_BSHD.stride(2)


def attention_backward(dy, q, k, v, y, lse_BHS: torch.Tensor, scale: float):
    """dq, dk, dv of square causal attention; all tensors but the log-sum-exp are (B, S, heads, D), D innermost."""
    (b, s, h, d), g = q.shape, k.shape[2]
    dy, q, k, v, y = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, q, k, v, y))
    lse, delta = lse_BHS.contiguous(), torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    delta_kernel[(triton.cdiv(s, 64), b * h)](y, dy, delta, s, h, *outer_strides(y), *outer_strides(dy), d, 64)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (q, k, v, dy, lse, delta)
    strides = [n for x in (q, k, v, dy) for n in outer_strides(x)]
    how = {"num_warps": 8, "num_stages": 3}
    dq_kernel[(triton.cdiv(s, 128), b * h)](*inputs, dq, s, scale, h, h // g, *strides, *outer_strides(dq), d, 128, 64, **how)
    dkdv_kernel[(triton.cdiv(s, 128), b * g)](*inputs, dk, dv, s, scale, g, h // g, *strides, *outer_strides(dk), d, 64, 128, **how)
    return dq, dk, dv
