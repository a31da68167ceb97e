"""Backward of causal attention in Triton, without atomics: one pass over keys for the gradient of queries, one over
queries for those of keys and values. Each sum has one owner and a fixed order, so two runs agree to the bit; cuDNN and
flash add to the queries' gradient from many blocks at once, in whatever order these come. Any width, any
GPU; Hopper has kernels of its own (`backward_hopper.py`), which `attention_backward` prefers.

    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ = dS K    dK = dS^T Q    dV = P^T dO

B sequences, S positions, H query heads, G key/value heads, D head width; M queries by N keys are worked on at a time.
The blocks of one head run side by side, so that what they read stays in the cache, those with most to do first.
"""

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
    here = first + start + rows
    inside = start + rows < S
    lse_M = tl.load(lse + here, mask=inside, other=float("inf")) * 1.4426950408889634
    delta_M = tl.load(delta + here, mask=inside, other=0.0)
    return lse_M, delta_M


@triton.jit
def attention_dq_kernel(
    q, k, v, dy, lse, delta, dq, S, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head against all keys up to them."""
    # prologue: this program's queries, those with most keys first
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    queries = load_head_block(q + b * q_b + h * q_h, m, rows, q_s, S, D)
    grads = load_head_block(dy + b * y_b + h * y_h, m, rows, y_s, S, D)
    lse_M, delta_M = load_statistics(lse, delta, tl.program_id(1).to(tl.int64) * S, m, rows, S)
    keys_at = k + b * k_b + (h // GROUP) * k_h
    values_at = v + b * v_b + (h // GROUP) * v_h
    total = tl.zeros((M, D), dtype=tl.float32)
    # main loop over key blocks
    for n in range(0, tl.minimum(m + M, S), N):
        keys = load_head_block(keys_at, n, columns, k_s, S, D)
        values = load_head_block(values_at, n, columns, v_s, S, D)
        scores = tl.dot(queries, keys.T, input_precision=EXACT) * (scale * 1.4426950408889634)
        visible = m + rows[:, None] >= n + columns[None, :]
        p = tl.where(visible, tl.exp2(scores - lse_M[:, None]), 0.0)
        ds = p * (tl.dot(grads, values.T, input_precision=EXACT) - delta_M[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total, input_precision=EXACT)
    # epilogue
    here = dq + b * o_b + h * o_h + (m + rows)[:, None] * o_s + tl.arange(0, D)[None, :]
    tl.store(here, (total * scale).to(dq.dtype.element_ty), mask=m + rows[:, None] < S)


@triton.jit
def attention_dkdv_kernel(
    q, k, v, dy, lse, delta, dk, dv, S, scale, G, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N keys and values of one head against all queries from them on, summed over the query heads of the group."""
    # prologue: this program's keys and values
    n = tl.program_id(0) * N
    b = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    keys = load_head_block(k + b * k_b + g * k_h, n, columns, k_s, S, D)
    values = load_head_block(v + b * v_b + g * v_h, n, columns, v_s, S, D)
    of_keys = tl.zeros((N, D), dtype=tl.float32)
    of_values = tl.zeros((N, D), dtype=tl.float32)
    # main loops over the group's query heads and over query blocks
    for h in range(g * GROUP, (g + 1) * GROUP):
        queries_at = q + b * q_b + h * q_h
        grads_at = dy + b * y_b + h * y_h
        first = (b * G * GROUP + h) * S
        for m in range(n // M * M, S, M):
            queries = load_head_block(queries_at, m, rows, q_s, S, D)
            grads = load_head_block(grads_at, m, rows, y_s, S, D)
            lse_M, delta_M = load_statistics(lse, delta, first, m, rows, S)
            scores = tl.dot(keys, queries.T, input_precision=EXACT) * (scale * 1.4426950408889634)
            visible = m + rows[None, :] >= n + columns[:, None]
            p = tl.where(visible, tl.exp2(scores - lse_M[None, :]), 0.0)
            of_values = tl.dot(p.to(grads.dtype), grads, of_values, input_precision=EXACT)
            ds = p * (tl.dot(values, grads.T, input_precision=EXACT) - delta_M[None, :])
            of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys, input_precision=EXACT)
    # epilogue
    here = b * o_b + g * o_h + (n + columns)[:, None] * o_s + tl.arange(0, D)[None, :]
    inside = n + columns[:, None] < S
    tl.store(dk + here, (of_keys * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + here, of_values.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def attention_delta_kernel(y, dy, delta, S, H, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr, M: tl.constexpr):
    """delta = sum(dy * y) per query."""
    m = tl.program_id(0) * M
    rows = tl.arange(0, M)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    result = load_head_block(y + b * y_b + h * y_h, m, rows, y_s, S, D).to(tl.float32)
    grads = load_head_block(dy + b * d_b + h * d_h, m, rows, d_s, S, D).to(tl.float32)
    delta_M = tl.sum(result * grads, 1)
    tl.store(delta + tl.program_id(1).to(tl.int64) * S + m + rows, delta_M, mask=m + rows < S)


def outer_strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of sequences, positions and heads; the elements of a head are contiguous."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def contiguous_heads(x_BSHD: torch.Tensor) -> torch.Tensor:
    return x_BSHD if x_BSHD.stride(-1) == 1 else x_BSHD.contiguous()


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
    b, s, h, d = q.shape
    g = k.shape[2]
    dy, q, k, v, y = (contiguous_heads(x) for x in (dy, q, k, v, y))
    if hopper_backward_applies(q, k, scale):
        return launch_hopper_backward(dy, q, k, v, y, lse_BHS, scale)
    delta = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    delta_grid = (triton.cdiv(s, DELTA_ROWS), b * h)
    attention_delta_kernel[delta_grid](y, dy, delta, s, h, *outer_strides(y, dy), d, DELTA_ROWS)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inputs = (q, k, v, dy, lse_BHS.contiguous(), delta)
    strides = outer_strides(q, k, v, dy)
    m, n, warps, stages = TILE
    options = {"num_warps": warps, "num_stages": stages}
    attention_dq_kernel[triton.cdiv(s, m), b * h](
        *inputs, dq, s, scale, h, h // g, *strides, *outer_strides(dq), d, m, n, **options
    )
    attention_dkdv_kernel[triton.cdiv(s, n), b * g](
        *inputs, dk, dv, s, scale, g, h // g, *strides, *outer_strides(dk), d, m, n, **options
    )
    return dq, dk, dv
