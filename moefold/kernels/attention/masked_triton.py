"""Masked attention in Triton: a query sees a range of keys that ends with its own (a document, a window, or both). Key
blocks that no query of a block sees are not read, forward or backward. Each sum has one owner and a fixed order, so two
runs agree to the bit. `masked.py` defines `first` and `until`. Imported only where Triton is.

B sequences, S queries, which are the last of L positions, H query heads, G key/value heads, D width of keys, V of
values, each in blocks of a power of two; M queries by N keys are worked on at a time. Scores are to the base of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# M, N, warps and stages of the three kernels: of a dozen tried on an H200 the best (docs/benchmarks/step-notes.md).
NARROW = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2))
WIDE = ((128, 64, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2))  # heads wider than 128
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_head_block(base, places, stride, end, D: tl.constexpr, WIDE: tl.constexpr):
    """(positions, WIDE) of one head, zeros behind the end and beyond its width."""
    d = tl.arange(0, WIDE)
    pointers = base + places[:, None] * stride + d[None, :]
    inside = places[:, None] < end
    if D == WIDE:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers, mask=inside & (d[None, :] < D), other=0.0)


@triton.jit
def store_head_block(base, places, stride, end, values, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    inside = (places[:, None] < end) & (d[None, :] < D)
    tl.store(base + places[:, None] * stride + d[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def masked_attention_kernel(
    q, k, v, first, sink, y, lse, S, L, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h,
    SINK: tl.constexpr, D: tl.constexpr, DW: tl.constexpr, V: tl.constexpr, VW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head, with an online softmax over their keys."""
    # prologue: this program's queries, and the sink
    start = tl.program_id(0) * M
    ahead = L - S
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rows = start + tl.arange(0, M)
    queries = load_head_block(q + b * q_b + h * q_h, rows, q_s, S, D, DW)
    first_M = tl.load(first + b * S + rows, mask=rows < S, other=L)
    keys_at = k + b * k_b + (h // GROUP) * k_h
    values_at = v + b * v_b + (h // GROUP) * v_h
    total = tl.zeros((M,), tl.float32)
    top = total - float("inf")
    if SINK:
        top = total + tl.load(sink + h).to(tl.float32) * LOG2E
        total += 1.0
    out = tl.zeros((M, VW), tl.float32)
    # main loop over key blocks, from the first that any query sees
    for n in range(tl.load(first + b * S + start) // N * N, tl.minimum(start + M + ahead, L), N):
        columns = n + tl.arange(0, N)
        keys = load_head_block(keys_at, columns, k_s, L, D, DW)
        scores = tl.dot(queries, keys.T) * (scale * LOG2E)
        visible = (columns[None, :] >= first_M[:, None]) & (columns[None, :] <= rows[:, None] + ahead)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: a query that has seen no key yet
        p = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(top - shift)
        values = load_head_block(values_at, columns, v_s, L, V, VW)
        out = tl.dot(p.to(values.dtype), values, out * kept[:, None])
        total = total * kept + tl.sum(p, 1)
        top = higher
    # epilogue: normalise
    store_head_block(y + b * y_b + h * y_h, rows, y_s, S, out / total[:, None], V, VW)
    lse_M = (top + tl.log2(total)) / LOG2E
    tl.store(lse + tl.program_id(1).to(tl.int64) * S + rows, lse_M, mask=rows < S)


@triton.jit
def masked_attention_dq_kernel(
    q, k, v, dy, first, y, lse, delta, dq, S, L, scale, H, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, d_b, d_s, d_h, y_b, y_s, y_h, o_b, o_s, o_h,
    D: tl.constexpr, DW: tl.constexpr, V: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of M queries of one head; and delta = sum(dy * y) per query, for the kernel that follows."""
    # prologue: this program's queries and their statistics
    start = tl.program_id(0) * M
    ahead = L - S
    b = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    rows = start + tl.arange(0, M)
    at = tl.program_id(1).to(tl.int64) * S
    queries = load_head_block(q + b * q_b + h * q_h, rows, q_s, S, D, DW)
    grads = load_head_block(dy + b * d_b + h * d_h, rows, d_s, S, V, VW)
    result = load_head_block(y + b * y_b + h * y_h, rows, y_s, S, V, VW)
    delta_M = tl.sum(result.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + at + rows, delta_M, mask=rows < S)
    lse_M = tl.load(lse + at + rows, mask=rows < S, other=float("inf")) * LOG2E
    first_M = tl.load(first + b * S + rows, mask=rows < S, other=L)
    keys_at = k + b * k_b + (h // GROUP) * k_h
    values_at = v + b * v_b + (h // GROUP) * v_h
    total = tl.zeros((M, DW), tl.float32)
    # main loop over key blocks
    for n in range(tl.load(first + b * S + start) // N * N, tl.minimum(start + M + ahead, L), N):
        columns = n + tl.arange(0, N)
        keys = load_head_block(keys_at, columns, k_s, L, D, DW)
        values = load_head_block(values_at, columns, v_s, L, V, VW)
        scores = tl.dot(queries, keys.T) * (scale * LOG2E)
        visible = (columns[None, :] >= first_M[:, None]) & (columns[None, :] <= rows[:, None] + ahead)
        p = tl.where(visible, tl.exp2(scores - lse_M[:, None]), 0.0)
        ds = p * (tl.dot(grads, values.T) - delta_M[:, None])
        total = tl.dot(ds.to(keys.dtype), keys, total)
    store_head_block(dq + b * o_b + h * o_h, rows, o_s, S, total * scale, D, DW)


@triton.jit
def masked_attention_dkdv_kernel(
    q, k, v, dy, until, lse, delta, dk, dv, S, L, scale, G, GROUP,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, d_b, d_s, d_h, ok_b, ok_s, ok_h, ov_b, ov_s, ov_h,
    D: tl.constexpr, DW: tl.constexpr, V: tl.constexpr, VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of N keys and values of one head, summed over the query heads of its group."""
    # prologue: this program's keys and values, and the queries that see them
    start = tl.program_id(0) * N
    ahead = L - S
    b = (tl.program_id(1) // G).to(tl.int64)
    g = tl.program_id(1) % G
    columns = start + tl.arange(0, N)
    keys = load_head_block(k + b * k_b + g * k_h, columns, k_s, L, D, DW)
    values = load_head_block(v + b * v_b + g * v_h, columns, v_s, L, V, VW)
    of_keys = tl.zeros((N, DW), tl.float32)
    of_values = tl.zeros((N, VW), tl.float32)
    lowest = tl.maximum(start - ahead, 0) // M * M
    until_N = tl.load(until + b * L + columns, mask=columns < L, other=0)
    end = tl.load(until + b * L + tl.minimum(start + N, L) - 1)  # of the last key: later queries see none of them
    # main loops over the group's query heads and over query blocks
    for h in range(g * GROUP, (g + 1) * GROUP):
        queries_at = q + b * q_b + h * q_h
        grads_at = dy + b * d_b + h * d_h
        at = (b * G * GROUP + h) * S
        for m in range(lowest, end, M):
            rows = m + tl.arange(0, M)
            queries = load_head_block(queries_at, rows, q_s, S, D, DW)
            grads = load_head_block(grads_at, rows, d_s, S, V, VW)
            lse_M = tl.load(lse + at + rows, mask=rows < S, other=float("inf")) * LOG2E
            delta_M = tl.load(delta + at + rows, mask=rows < S, other=0.0)
            scores = tl.dot(keys, queries.T) * (scale * LOG2E)
            visible = (columns[:, None] <= rows[None, :] + ahead) & (rows[None, :] < until_N[:, None])
            p = tl.where(visible, tl.exp2(scores - lse_M[None, :]), 0.0)
            of_values = tl.dot(p.to(grads.dtype), grads, of_values)
            ds = p * (tl.dot(values, grads.T) - delta_M[None, :])
            of_keys = tl.dot(ds.to(queries.dtype), queries, of_keys)
    # epilogue
    store_head_block(dk + b * ok_b + g * ok_h, columns, ok_s, L, of_keys * scale, D, DW)
    store_head_block(dv + b * ov_b + g * ov_h, columns, ov_s, L, of_values, V, VW)


def outer_strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of sequences, positions and heads; the elements of a head are contiguous."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def padded_widths(q_BSHD: torch.Tensor, v_BLGV: torch.Tensor) -> list[int]:
    """D and V, each with the power of two that holds it."""
    d, v = q_BSHD.shape[-1], v_BLGV.shape[-1]
    return [d, max(16, triton.next_power_of_2(d)), v, max(16, triton.next_power_of_2(v))]


def tile_launch_options(
    kernel: int, q_BSHD: torch.Tensor, v_BLGV: torch.Tensor
) -> tuple[tuple[int, int], dict[str, int]]:
    """(M, N) of one of the three kernels, and its warps and stages."""
    widest = max(padded_widths(q_BSHD, v_BLGV))
    tiles = WIDE if widest > 128 else NARROW
    m, n, warps, stages = tiles[kernel]
    return (m, n), {"num_warps": warps, "num_stages": stages}


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Heads with contiguous columns, and positions within reach of 32-bit offsets."""
    reach = x.stride(1) * x.shape[1]
    return x if x.stride(-1) == 1 and reach < 1 << 31 else x.contiguous()


def masked_attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_BS: torch.Tensor, sink_H: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S, H, V) and its log-sum-exp (B, H, S), sinks included."""
    b, s, h, _ = q.shape
    length, g = k.shape[1:3]
    q, k, v = addressable(q), addressable(k), addressable(v)
    y = torch.empty(b, s, h, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    (m, n), options = tile_launch_options(0, q, v)
    masked_attention_kernel[triton.cdiv(s, m), b * h](
        q, k, v, first_BS, sink_H, y, lse, s, length, scale, h, h // g, *outer_strides(q, k, v, y),
        sink_H is not None, *padded_widths(q, v), m, n, **options,
    )  # fmt: skip
    return y, lse


def masked_attention_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_BS: torch.Tensor,
    until_BL: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and delta (B, H, S)."""
    b, s, h, _ = q.shape
    length, g = k.shape[1:3]
    dy, q, k, v, y = (addressable(x) for x in (dy, q, k, v, y))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    widths = padded_widths(q, v)
    (m, n), options = tile_launch_options(1, q, v)
    masked_attention_dq_kernel[triton.cdiv(s, m), b * h](
        q, k, v, dy, first_BS, y, lse, delta, dq, s, length, scale, h, h // g,
        *outer_strides(q, k, v, dy, y, dq), *widths, m, n, **options,
    )  # fmt: skip
    (m, n), options = tile_launch_options(2, q, v)
    masked_attention_dkdv_kernel[triton.cdiv(length, n), b * g](
        q, k, v, dy, until_BL, lse, delta, dk, dv, s, length, scale, g, h // g,
        *outer_strides(q, k, v, dy, dk, dv), *widths, m, n, **options,
    )  # fmt: skip
    return dq, dk, dv, delta
