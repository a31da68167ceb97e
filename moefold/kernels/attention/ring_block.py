"""One block of attention whose softmax runs over more keys than are here: what ring attention is made of.

Forward gives the block's own softmax and its log-sum-exp, by which blocks are merged. Backward gets the log-sum-exp
over all keys and delta = sum(dy * y) per query, and gives this block's summands of the gradients. The first query
stands `ahead` places behind the first key; a query sees keys that are not behind it and, with a window, not too far
before it. One that sees none here has zeros and a log-sum-exp of -inf.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head. Not
differentiable by itself.
"""

from __future__ import annotations

import torch

from moefold.kernels.attention.attention import attention_mask, heads_first
from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def attention_block(
    q_BSHD: torch.Tensor, k_BLGD: torch.Tensor, v_BLGV: torch.Tensor, scale: float, ahead: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_BSHV in fp32 or better, and lse_BSH."""
    _, _, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).nan_to_num(nan=-torch.inf).exp() @ v
    return out.transpose(1, 2), lse.transpose(1, 2)


@register_op
def attention_block_backward(
    dy_BSHV: torch.Tensor,
    q_BSHD: torch.Tensor,
    k_BLGD: torch.Tensor,
    v_BLGV: torch.Tensor,
    lse_BSH: torch.Tensor,
    delta_BSH: torch.Tensor,
    scale: float,
    ahead: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of this block, in fp32 or better."""
    b, length, g, _ = k_BLGD.shape
    q, k, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window)
    dy = dy_BSHV.transpose(1, 2).to(scores.dtype)
    p = (scores - lse_BSH.transpose(1, 2)[..., None]).exp()
    ds = p * (dy @ v.transpose(-1, -2) - delta_BSH.transpose(1, 2)[..., None]) * scale
    dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
    dk, dv = (x.view(b, g, -1, length, x.shape[-1]).sum(2).transpose(1, 2) for x in (dk, dv))
    return (ds @ k).transpose(1, 2), dk, dv


def masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale: float, ahead: int, window: int) -> tuple[torch.Tensor, ...]:
    """q, k and v with heads first, and the scores, -inf where a key is not seen."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    hidden = ~attention_mask(q.shape[2], k.shape[2], ahead, window, q.device)
    return q, k, v, (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)


BLOCK_CASE_SIZES = [  # B, S, L, H, G, D, V, ahead, window
    (1, 1, 2, 1, 1, 8, 8, 2, 0),
    (2, 8, 8, 4, 2, 16, 16, 0, 0),
    (2, 8, 24, 4, 1, 16, 16, 24, 0),
    (1, 8, 8, 2, 2, 24, 16, 0, 3),
    (2, 8, 8, 4, 2, 16, 16, 8, 5),
    (1, 8, 8, 1, 1, 8, 8, 32, 4),
]


@attention_block.register_cases
def _(device: str, dtype: torch.dtype):
    for b, s, length, h, g, d, dv, ahead, window in BLOCK_CASE_SIZES:
        q, k = seeded_randn(device, dtype, b, s, h, d), seeded_randn(device, dtype, b, length, g, d, seed=1)
        v = seeded_randn(device, dtype, b, length, g, dv, seed=2)
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}, {ahead} ahead"
        yield KernelCase(f"{name}, window {window}" if window else name, (q, k, v, d**-0.5, ahead, window))


@attention_block_backward.register_cases
def _(device: str, dtype: torch.dtype):
    for case in attention_block.make_cases(device, dtype):  # pyright: ignore[reportOptionalCall]
        q, k, v, *how = case.inputs
        out, lse = attention_block.reference(q, k, v, *how)
        dy = seeded_randn(device, dtype, *out.shape, seed=3)
        lse = lse.clamp(min=-30)  # a query that sees nothing here sees something elsewhere
        yield KernelCase(case.name, (dy, q, k, v, lse, (dy * out).sum(-1), *how))
