"""One block of attention whose softmax runs over more keys than are here: what ring attention is made of.

Forward gives the block's own softmax and its log-sum-exp, by which blocks are merged. Backward gets the log-sum-exp
over all keys and delta = sum(dy * y) per query, and gives this block's summands of the gradients.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width. Not differentiable by itself.
"""

from __future__ import annotations

import torch

from moefold.kernels.attention import future, heads_first
from moefold.kernels.registry import Case, op, random


@op
def attention_block(
    q_BSHD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGD: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_BSHD in fp32 or better, and lse_BSH. `causal`: the last query is at the last key; else every key counts."""
    _, scores, v = block_scores(q_BSHD, k_BLGD, v_BLGD, causal)
    out = scores.softmax(-1) @ v
    return out.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


@op
def attention_block_backward(
    dy_BSHD: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BLGD: torch.Tensor,
    v_BLGD: torch.Tensor,
    lse_BSH: torch.Tensor,
    delta_BSH: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of this block, in fp32 or better."""
    b, length, g, d = k_BLGD.shape
    q, scores, v = block_scores(q_BSHD, k_BLGD, v_BLGD, causal)
    k = heads_first(q_BSHD, k_BLGD, v_BLGD, scores.dtype)[1]
    dy = dy_BSHD.transpose(1, 2).to(scores.dtype)
    p = (scores - lse_BSH.transpose(1, 2)[..., None]).exp()
    ds = p * (dy @ v.transpose(-1, -2) - delta_BSH.transpose(1, 2)[..., None]) * d**-0.5
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
    dk, dv = (x.view(b, g, -1, length, d).sum(2).transpose(1, 2) for x in (dk, dv))
    return (ds @ k).transpose(1, 2), dk, dv


def block_scores(q_BSHD, k_BLGD, v_BLGD, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGD, wide)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return q, scores.masked_fill(future(scores), float("-inf")) if causal else scores, v


SIZES = [(1, 1, 2, 1, 1, 8, False), (2, 8, 8, 4, 2, 16, True), (2, 8, 24, 4, 1, 16, False)]


@attention_block.cases
def _(device: str, dtype: torch.dtype):
    for b, s, length, h, g, d, causal in SIZES:
        q = random(device, dtype, b, s, h, d)
        k, v = (random(device, dtype, b, length, g, d, seed=i) for i in (1, 2))
        yield Case(f"{b}x{s} on {length}, {h}/{g} heads of {d}", (q, k, v, causal))


@attention_block_backward.cases
def _(device: str, dtype: torch.dtype):
    for case in attention_block.make_cases(device, dtype):  # pyright: ignore[reportOptionalCall]
        q, k, v, causal = case.inputs
        out, lse = attention_block.reference(q, k, v, causal)
        dy = random(device, dtype, *q.shape, seed=3)
        yield Case(case.name, (dy, q, k, v, lse, (dy * out).sum(-1), causal))
