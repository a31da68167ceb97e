"""Causal attention with grouped queries: each key and value head serves a group of query heads.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from moefold.kernels.registry import Case, op, random


@op
def attention(q_BSHD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D), causal) v, scores in fp32 or better. The S queries are the last of the L positions."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGD, wide)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    out = scores.masked_fill(future(scores), float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).to(q_BSHD.dtype)


def heads_first(q_BSHD, k_BLGD, v_BLGD, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, H, positions, D) each, key and value heads repeated for their group of queries."""
    group = q_BSHD.shape[2] // k_BLGD.shape[2]
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q_BSHD, k_BLGD, v_BLGD))
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def future(scores: torch.Tensor) -> torch.Tensor:
    """True where a key lies behind its query, the last query being at the last key."""
    s, length = scores.shape[-2:]
    return torch.ones(s, length, dtype=torch.bool, device=scores.device).triu(1 + length - s)


@attention.fast("sdpa")
def _(q_BSHD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BLGD, v_BLGD))
    grouped, square = q.shape[1] != k.shape[1], q.shape[2] == k.shape[2]
    mask = None if square else causal_lower_right(q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, enable_gqa=grouped)
    return out.transpose(1, 2)


@attention.cases
def _(device: str, dtype: torch.dtype):
    sizes = [
        (1, 1, 1, 1, 1, 8),
        (2, 33, 33, 4, 2, 16),
        (1, 64, 64, 6, 6, 32),
        (1, 257, 257, 4, 1, 64),
        (2, 16, 48, 4, 2, 16),
    ]
    for b, s, length, h, g, d in sizes:
        q = random(device, dtype, b, s, h, d)
        k, v = (random(device, dtype, b, length, g, d, seed=i) for i in (1, 2))
        yield Case(f"{b}x{s} on {length}, {h}/{g} heads of {d}", (q, k, v))
