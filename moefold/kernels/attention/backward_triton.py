"""Backward of causal attention in Triton, without atomics: one pass over keys for the gradient of queries, one over
queries for those of keys and values. Each sum has one owner and a fixed order, so two runs agree to the bit; cuDNN and
flash add to the queries' gradient from many blocks at once, in whatever order these come. Any width, any card; Hopper
has kernels of its own (`attention_hopper.py`), which `attention_backward` prefers.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ = dS K    dK = dS^T Q    dV = P^T dO

B sequences, S positions, H query heads, G key/value heads, D head width; M queries by N keys are worked on at a time.
The blocks of one head run side by side, so that what they read stays in the cache, those with most to do first.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.kernels.attention.backward_hopper_launch import hopper_backward_applies, launch_hopper_backward

# M, N, warps, stages: of a dozen tried on an H200 the best for both kernels (docs/benchmarks/step-notes.md).
TILE = (64, 64, 4, 2)
DELTA_ROWS = 64
EXACT = tl.constexpr("ieee")  # fp32 is not cut to tf32; 16-bit numbers are multiplied exactly anyway


@triton.jit
def load_head_block(base, start, rows, stride, S, D: tl.constexpr):
    """(rows, D) of one head, zeros behind the end."""
    offsets = start + rows
    pointers = base + offsets[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=offsets[:, None] < S, other=0.0)


@triton.jit
def load_statistics(lse, delta, first, start, rows, S):
    """Log-sum-exp, to the base of two, and delta of some queries."""
    here, inside = first + start + rows, start + rows < S
    lse_M = tl.load(lse + here, mask=inside, other=float("inf")) * 1.4426950408889634
    return lse_M, tl.load(delta + here, mask=inside, other=0.0)


@triton.jit
def attention_dq_kernel(
    q, k, v, dy, lse, delta, dq, S, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head against all keys up to them."""
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    queries = load_head_block(q + b * q_b + h * q_h, m, rows, q_s, S, D)
    grads = load_head_block(dy + b * y_b + h * y_h, m, rows, y_s, S, D)
    lse_M, delta_M = load_statistics(lse, delta, tl.program_id(1).to(tl.int64) * S, m, rows, S)
    keys_at, values_at = k + b * k_b + (h // GROUP) * k_h, v + b * v_b + (h // GROUP) * v_h
    total = tl.zeros((M, D), dtype=tl.float32)
    for n in range(0, tl.minimum(m + M, S), N):
        keys, values = (
            load_head_block(keys_at, n, columns, k_s, S, D),
            load_head_block(values_at, n, columns, v_s, S, D),
        )
        scores = tl.dot(queries, keys.T, input_precision=EXACT) * (scale * 1.4426950408889634)
        p = tl.where(m + rows[:, None] >= n + columns[None, :], tl.exp2(scores - lse_M[:, None]), 0.0)
        ds = p * (tl.dot(grads, values.T, input_precision=EXACT) - delta_M[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total, input_precision=EXACT)
    here = dq + b * o_b + h * o_h + (m + rows)[:, None] * o_s + tl.arange(0, D)[None, :]
    tl.store(here, (total * scale).to(dq.dtype.element_ty), mask=m + rows[:, None] < S)


@triton.jit
def attention_dkdv_kernel(
    q, k, v, dy, lse, delta, dk, dv, S, scale, G, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N keys and values of one head against all queries from them on, of every query head of the group in turn."""
    n = tl.program_id(0) * N
    b, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    keys = load_head_block(k + b * k_b + g * k_h, n, columns, k_s, S, D)
    values = load_head_block(v + b * v_b + g * v_h, n, columns, v_s, S, D)
    of_keys, of_values = tl.zeros((N, D), dtype=tl.float32), tl.zeros((N, D), dtype=tl.float32)
    for h in range(g * GROUP, (g + 1) * GROUP):
        queries_at, grads_at, first = q + b * q_b + h * q_h, dy + b * y_b + h * y_h, (b * G * GROUP + h) * S
        for m in range(n // M * M, S, M):
            queries, grads = (
                load_head_block(queries_at, m, rows, q_s, S, D),
                load_head_block(grads_at, m, rows, y_s, S, D),
            )
            lse_M, delta_M = load_statistics(lse, delta, first, m, rows, S)
            scores = tl.dot(keys, queries.T, input_precision=EXACT) * (scale * 1.4426950408889634)
            p = tl.where(m + rows[None, :] >= n + columns[:, None], tl.exp2(scores - lse_M[None, :]), 0.0)
            of_values = tl.dot(p.to(grads.dtype), grads, of_values, input_precision=EXACT)
            ds = p * (tl.dot(values, grads.T, input_precision=EXACT) - delta_M[None, :])
            of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys, input_precision=EXACT)
    here = b * o_b + g * o_h + (n + columns)[:, None] * o_s + tl.arange(0, D)[None, :]
    tl.store(dk + here, (of_keys * scale).to(dk.dtype.element_ty), mask=n + columns[:, None] < S)
    tl.store(dv + here, of_values.to(dv.dtype.element_ty), mask=n + columns[:, None] < S)


@triton.jit
def attention_delta_kernel(y, dy, delta, S, H, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr, M: tl.constexpr):
    """For each query, the sum of its result times the result's gradient."""
    m, rows = tl.program_id(0) * M, tl.arange(0, M)
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    result = load_head_block(y + b * y_b + h * y_h, m, rows, y_s, S, D).to(tl.float32)
    grads = load_head_block(dy + b * d_b + h * d_h, m, rows, d_s, S, D).to(tl.float32)
    tl.store(delta + tl.program_id(1).to(tl.int64) * S + m + rows, tl.sum(result * grads, 1), mask=m + rows < S)


def outer_strides(x_BSHD: torch.Tensor) -> tuple[int, ...]:
    return x_BSHD.stride()[:3]


def attention_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    lse_BHS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of square causal attention; all tensors but the log-sum-exp are (B, S, heads, D), D a power of two."""
    (b, s, h, d), g = q.shape, k.shape[2]
    dy, q, k, v, y = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, q, k, v, y))
    if hopper_backward_applies(q, k, scale):
        return launch_hopper_backward(dy, q, k, v, y, lse_BHS, scale)
    delta = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    attention_delta_kernel[triton.cdiv(s, DELTA_ROWS), b * h](
        y, dy, delta, s, h, *outer_strides(y), *outer_strides(dy), d, DELTA_ROWS
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (q, k, v, dy, lse_BHS.contiguous(), delta)
    strides = [*outer_strides(q), *outer_strides(k), *outer_strides(v), *outer_strides(dy)]
    m, n, warps, stages = TILE
    how = {"num_warps": warps, "num_stages": stages}
    attention_dq_kernel[triton.cdiv(s, m), b * h](
        *inputs, dq, s, scale, h, h // g, *strides, *outer_strides(dq), d, m, n, **how
    )
    attention_dkdv_kernel[triton.cdiv(s, n), b * g](
        *inputs, dk, dv, s, scale, g, h // g, *strides, *outer_strides(dk), d, m, n, **how
    )
    return dq, dk, dv
