"""Backward of causal attention in Triton, without atomics: one pass over keys for the gradient of queries, one over
queries for those of keys and values. Each sum has one owner and a fixed order, so two runs agree to the bit; cuDNN and
flash add to the queries' gradient from many blocks at once, in whatever order these come.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ = dS K    dK = dS^T Q    dV = P^T dO

B sequences, S positions, H query heads, G key/value heads, D head width; M queries by N keys are worked on at a time.
Blocks with most to do begin first. Only those that the diagonal crosses are masked.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# M, N, warps, stages: of a dozen tried on an H200 the best for both kernels (docs/benchmarks/notes.md).
TILE = (64, 64, 4, 2)
DELTA_ROWS = 64


@triton.jit
def block_at(base, start, rows, stride, S, D: tl.constexpr):
    """(rows, D) of one head, zeros behind the end."""
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=start + rows[:, None] < S, other=0.0)


@triton.jit
def statistics_at(lse, delta, first, start, rows, S):
    """Log-sum-exp, to the base of two, and delta of some queries."""
    here, inside = first + start + rows, start + rows < S
    lse_M = tl.load(lse + here, mask=inside, other=float("inf")) * 1.4426950408889634
    return lse_M, tl.load(delta + here, mask=inside, other=0.0)


@triton.jit
def probabilities(scores, lse, seen, MASKED: tl.constexpr):
    p = tl.exp2(scores - lse)
    return tl.where(seen, p, 0.0) if MASKED else p


@triton.jit
def add_dq(
    total, queries, grads, lse_M, delta_M, k, v, k_s, v_s, m, begin, end, scale, S,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the keys from `begin` to `end` add."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    for n in range(begin, end, N):
        keys, values = block_at(k, n, columns, k_s, S, D), block_at(v, n, columns, v_s, S, D)
        scores = tl.dot(queries, keys.T) * (scale * 1.4426950408889634)
        p = probabilities(scores, lse_M[:, None], m + rows[:, None] >= n + columns[None, :], MASKED)
        ds = p * (tl.dot(grads, values.T) - delta_M[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total)
    return total


@triton.jit
def dq_kernel(
    q, k, v, dy, lse, delta, dq, S, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head against all keys up to them."""
    m = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    b, h, rows = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.arange(0, M)
    queries = block_at(q + b * q_b + h * q_h, m, rows, q_s, S, D)
    grads = block_at(dy + b * y_b + h * y_h, m, rows, y_s, S, D)
    lse_M, delta_M = statistics_at(lse, delta, tl.program_id(0).to(tl.int64) * S, m, rows, S)
    k_at, v_at = k + b * k_b + (h // GROUP) * k_h, v + b * v_b + (h // GROUP) * v_h
    total = tl.zeros((M, D), dtype=tl.float32)
    whole, end = m // N * N, tl.minimum(m + M, S)
    total = add_dq(
        total, queries, grads, lse_M, delta_M, k_at, v_at, k_s, v_s, m, 0, whole, scale, S, D, M, N, False
    )  # fmt: skip
    total = add_dq(
        total, queries, grads, lse_M, delta_M, k_at, v_at, k_s, v_s, m, whole, end, scale, S, D, M, N, True
    )  # fmt: skip
    here = dq + b * o_b + h * o_h + (m + rows)[:, None].to(tl.int64) * o_s + tl.arange(0, D)[None, :]
    tl.store(here, (total * scale).to(dq.dtype.element_ty), mask=m + rows[:, None] < S)


@triton.jit
def add_dkdv(
    of_keys, of_values, keys, values, q, dy, lse, delta, q_s, y_s, first, n, begin, end, scale, S,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What the queries of one head from `begin` to `end` add."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    for m in range(begin, end, M):
        queries, grads = block_at(q, m, rows, q_s, S, D), block_at(dy, m, rows, y_s, S, D)
        lse_M, delta_M = statistics_at(lse, delta, first, m, rows, S)
        scores = tl.dot(keys, queries.T) * (scale * 1.4426950408889634)
        p = probabilities(scores, lse_M[None, :], m + rows[None, :] >= n + columns[:, None], MASKED)
        of_values = tl.dot(p.to(grads.dtype), grads, of_values)
        ds = p * (tl.dot(values, grads.T) - delta_M[None, :])
        of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys)
    return of_keys, of_values


@triton.jit
def dkdv_kernel(
    q, k, v, dy, lse, delta, dk, dv, S, scale, G, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N keys and values of one head against all queries from them on, of every query head of the group in turn."""
    n = tl.program_id(1) * N
    b, g, columns = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G, tl.arange(0, N)
    keys = block_at(k + b * k_b + g * k_h, n, columns, k_s, S, D)
    values = block_at(v + b * v_b + g * v_h, n, columns, v_s, S, D)
    of_keys, of_values = tl.zeros((N, D), dtype=tl.float32), tl.zeros((N, D), dtype=tl.float32)
    begin, plain = n // M * M, tl.minimum((n + N + M - 1) // M * M, S)
    for h in range(g * GROUP, (g + 1) * GROUP):
        q_at, y_at, first = q + b * q_b + h * q_h, dy + b * y_b + h * y_h, (b * G * GROUP + h) * S
        of_keys, of_values = add_dkdv(
            of_keys, of_values, keys, values, q_at, y_at, lse, delta, q_s, y_s, first, n, begin, plain, scale, S,
            D, M, N, True,
        )  # fmt: skip
        of_keys, of_values = add_dkdv(
            of_keys, of_values, keys, values, q_at, y_at, lse, delta, q_s, y_s, first, n, plain, S, scale, S,
            D, M, N, False,
        )  # fmt: skip
    here = b * o_b + g * o_h + (n + columns)[:, None].to(tl.int64) * o_s + tl.arange(0, D)[None, :]
    tl.store(dk + here, (of_keys * scale).to(dk.dtype.element_ty), mask=n + columns[:, None] < S)
    tl.store(dv + here, of_values.to(dv.dtype.element_ty), mask=n + columns[:, None] < S)


@triton.jit
def delta_kernel(y, dy, delta, S, H, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr, M: tl.constexpr):
    """For each query, the sum of its result times the result's gradient."""
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    m, rows = tl.program_id(1) * M, tl.arange(0, M)
    result = block_at(y + b * y_b + h * y_h, m, rows, y_s, S, D).to(tl.float32)
    grads = block_at(dy + b * d_b + h * d_h, m, rows, d_s, S, D).to(tl.float32)
    tl.store(delta + tl.program_id(0).to(tl.int64) * S + m + rows, tl.sum(result * grads, 1), mask=m + rows < S)


def outer(x_BSHD: torch.Tensor) -> tuple[int, ...]:
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
    delta = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    delta_kernel[b * h, triton.cdiv(s, DELTA_ROWS)](y, dy, delta, s, h, *outer(y), *outer(dy), d, DELTA_ROWS)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (q, k, v, dy, lse_BHS.contiguous(), delta)
    strides = [*outer(q), *outer(k), *outer(v), *outer(dy)]
    m, n, warps, stages = TILE
    how = {"num_warps": warps, "num_stages": stages}
    dq_kernel[b * h, triton.cdiv(s, m)](*inputs, dq, s, scale, h, h // g, *strides, *outer(dq), d, m, n, **how)
    dkdv_kernel[b * g, triton.cdiv(s, n)](*inputs, dk, dv, s, scale, g, h // g, *strides, *outer(dk), d, m, n, **how)
    return dq, dk, dv
