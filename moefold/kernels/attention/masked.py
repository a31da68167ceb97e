"""Attention over runs of keys: what each query sees, as rows of numbers, and autograd around the kernels.

    keys     0 . . . 4 . . . 8 . .        query 6 of a document that began at 4 sees 4 5 6; first = 4
    first    0 0 0 0 4 4 4 4 8 8 8        key 5 is seen by queries 5 6 7; until = 8

B sequences, S queries, which are the last of L positions, H query heads, G key/value heads, D head width, V of values.
"""

from __future__ import annotations

import torch


class MaskedAttentionFunction(torch.autograd.Function):
    """Only blocks of keys that some query sees are read, both ways, and sums have a fixed order. A window is a later
    beginning."""

    @staticmethod
    def forward(ctx, q_BSHD, k_BLGD, v_BLGV, scale: float, window: int, sink_H, begins_BS):
        from moefold.kernels.attention.masked_triton import masked_attention_forward

        first_BS = first_visible_key(q_BSHD, k_BLGD, window, begins_BS)
        y_BSHV, lse_BHS = masked_attention_forward(q_BSHD, k_BLGD, v_BLGV, first_BS, sink_H, scale)
        ctx.save_for_backward(q_BSHD, k_BLGD, v_BLGV, sink_H, first_BS, y_BSHV, lse_BHS)
        ctx.scale = scale
        return y_BSHV

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.attention.masked_triton import masked_attention_backward

        q, k, v, sink_H, first_BS, y, lse_BHS = ctx.saved_tensors
        until_BL = visible_until_query(first_BS, k.shape[1])
        dq, dk, dv, delta_BHS = masked_attention_backward(
            gradients[0], q, k, v, first_BS, until_BL, y, lse_BHS, ctx.scale
        )
        d_sink = None
        if sink_H is not None:
            d_sink = -((sink_H.float()[:, None] - lse_BHS).exp() * delta_BHS).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, None, None, d_sink, None


def first_visible_key(q_BSHD, k_BLGD, window: int, begins_BS: torch.Tensor | None) -> torch.Tensor:
    """The place of the first key that each query sees: of its document or, if that is later, of its window."""
    (b, s), length, like = q_BSHD.shape[:2], k_BLGD.shape[1], {"dtype": torch.int32, "device": q_BSHD.device}
    first_BS = torch.zeros(b, s, **like) if begins_BS is None else begins_BS.int().contiguous()
    if not window:
        return first_BS
    return first_BS.maximum(torch.arange(length - s, length, **like) - (window - 1))


def visible_until_query(first_BS: torch.Tensor, length: int) -> torch.Tensor:
    """For each key, the number of queries whose first key is not behind it: later queries do not see it."""
    places = torch.arange(length, dtype=torch.int32, device=first_BS.device)
    return torch.searchsorted(first_BS, places.expand(len(first_BS), -1).contiguous(), right=True, out_int32=True)
