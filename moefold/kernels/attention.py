"""Causal attention with grouped queries: each key and value head serves a group of query heads.

B sequences, S positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import Case, op, random


@op
def attention(q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D), causal) v, scores in fp32 or better."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    group = q_BSHD.shape[2] // k_BSGD.shape[2]
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q_BSHD, k_BSGD, v_BSGD))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).to(q_BSHD.dtype)


@attention.fast("sdpa")
def _(q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSGD, v_BSGD))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@attention.cases
def _(device: str, dtype: torch.dtype):
    for b, s, h, g, d in [(1, 1, 1, 1, 8), (2, 33, 4, 2, 16), (1, 64, 6, 6, 32), (1, 257, 4, 1, 64)]:
        q = random(device, dtype, b, s, h, d)
        k, v = (random(device, dtype, b, s, g, d, seed=i) for i in (1, 2))
        yield Case(f"{b}x{s} {h}/{g} heads of {d}", (q, k, v))
