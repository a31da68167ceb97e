"""One block of ring attention: attention to some of the keys, with a softmax that runs over the keys of all blocks.

Forward returns the block's own softmax and its log-sum-exp, by which blocks are merged. Backward takes the log-sum-exp
over all keys and delta = sum(dy * y) per query, and returns this block's summands of the gradients. The first query is
`ahead` positions behind the first key. A query sees keys up to its own position and, with a window, at most so many of
them. A query that sees no key here has zeros and a log-sum-exp of -inf.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head. Not
differentiable by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moefold.kernels.attention.attention import attention_mask, heads_first
from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def attention_block(
    q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float, ahead: int, window: int
) -> tuple[Tensor, Tensor]:
    """out_BSHV in fp32 or better, and lse_BSH."""
    _, _, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window)
    lse = scores.logsumexp(-1)
    log_p = scores - lse[..., None]
    log_p = log_p.nan_to_num(nan=-torch.inf)  # NaN: -inf minus -inf, of a query that sees no key
    out = log_p.exp() @ v
    return out.transpose(1, 2), lse.transpose(1, 2)


@register_op
def attention_block_backward(
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    lse_BSH: Tensor,
    delta_BSH: Tensor,
    scale: float,
    ahead: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this block, in fp32 or better."""
    q, k, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window)
    dy = dy_BSHV.transpose(1, 2).to(scores.dtype)
    lse = lse_BSH.transpose(1, 2)[..., None]
    delta = delta_BSH.transpose(1, 2)[..., None]
    p = (scores - lse).exp()
    dp = dy @ v.mT
    ds = p * (dp - delta) * scale
    dq = ds @ k
    groups = k_BLGD.shape[2]
    dk = sum_over_groups(ds.mT @ q, groups)
    dv = sum_over_groups(p.mT @ dy, groups)
    return dq.transpose(1, 2), dk, dv


def sum_over_groups(gradient: Tensor, groups: int) -> Tensor:
    """(B, H, L, width) summed over the query heads of each key/value head: (B, L, G, width)."""
    by_group = gradient.unflatten(1, (groups, -1))
    return by_group.sum(2).transpose(1, 2)


def masked_block_scores(
    q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float, ahead: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v with heads first, and the scores, -inf where a key is not visible."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    scores = q @ k.mT * scale
    queries, keys = scores.shape[-2:]
    visible = attention_mask(queries, keys, ahead, window, q.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    return q, k, v, scores


BLOCK_CASE_SIZES = [  # B, S, L, H, G, D, V, ahead, window
    (1, 1, 2, 1, 1, 8, 8, 2, 0),
    (2, 8, 8, 4, 2, 16, 16, 0, 0),
    (2, 8, 24, 4, 1, 16, 16, 24, 0),
    (1, 8, 8, 2, 2, 24, 16, 0, 3),
    (2, 8, 8, 4, 2, 16, 16, 8, 5),
    (1, 8, 8, 1, 1, 8, 8, 32, 4),
]


@attention_block.register_cases
def attention_block_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for b, s, length, h, g, d, dv, ahead, window in BLOCK_CASE_SIZES:
        q = seeded_randn(device, dtype, b, s, h, d)
        k = seeded_randn(device, dtype, b, length, g, d, seed=1)
        v = seeded_randn(device, dtype, b, length, g, dv, seed=2)
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}, {ahead} ahead"
        if window:
            name += f", window {window}"
        scale = d**-0.5
        yield KernelCase(name, (q, k, v, scale, ahead, window))


@attention_block_backward.register_cases
def attention_block_backward_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for case in attention_block.cases(device, dtype):
        q, k, v, scale, ahead, window = case.inputs
        out, lse = attention_block.reference(q, k, v, scale, ahead, window)
        dy = seeded_randn(device, dtype, *out.shape, seed=3)
        lse = lse.clamp(min=-30)  # a query that sees no key here sees some in other blocks
        delta = (dy * out).sum(-1)
        yield KernelCase(case.name, (dy, q, k, v, lse, delta, scale, ahead, window))
