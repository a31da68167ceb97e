"""Masked attention (documents, windows, sinks): the range of keys that each query sees, and autograd for the kernels.

    keys     0 . . . 4 . . . 8 . .        query 6 of a document that began at 4 sees 4 5 6; first = 4
    first    0 0 0 0 4 4 4 4 8 8 8        key 5 is seen by queries 5 6 7; until = 8

B sequences, S queries, which are the last of L positions, H query heads, G key/value heads, D head width, V of values.
"""

from __future__ import annotations

import torch
from torch import Tensor


class MaskedAttentionFunction(torch.autograd.Function):
    """Reads only key blocks that some query sees, forward and backward, with sums in a fixed order. A window moves the
    first visible key forward."""

    @staticmethod
    def forward(ctx, q_BSHD, k_BLGD, v_BLGV, scale: float, window: int, sink_H, begins_BS):
        from moefold.kernels.attention.masked_triton import masked_attention_forward

        ahead = k_BLGD.shape[1] - q_BSHD.shape[1]
        first_BS = first_visible_key(q_BSHD, ahead, window, begins_BS)
        heads = (q_BSHD, k_BLGD, v_BLGV)
        y_BSHV, lse_BHS = masked_attention_forward(*heads, first_BS, sink_H, scale, ahead)
        ctx.save_for_backward(*heads, sink_H, first_BS, y_BSHV, lse_BHS)
        ctx.scale = scale
        return y_BSHV

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.attention.masked_triton import masked_attention_backward

        q, k, v, sink_H, first_BS, y, lse_BHS = ctx.saved_tensors
        keys = k.shape[1]
        until_BL = visible_until_query(first_BS, keys)
        delta_BHS = torch.empty_like(lse_BHS)
        ahead = keys - q.shape[1]
        heads = (gradients[0], q, k, v)
        ranges = (first_BS, until_BL)
        sums = (lse_BHS, delta_BHS)
        dq, dk, dv = masked_attention_backward(*heads, *ranges, y, *sums, ctx.scale, ahead)
        d_sink = sink_gradient(sink_H, lse_BHS, delta_BHS)
        return dq, dk, dv, None, None, d_sink, None


def sink_gradient(sink_H: Tensor | None, lse_BHS: Tensor, delta_BHS: Tensor) -> Tensor | None:
    """The sink's value is zero, so its dP is zero and dS = -P delta."""
    if sink_H is None:
        return None
    wide_H = sink_H.to(lse_BHS.dtype)
    log_p_BHS = wide_H[:, None] - lse_BHS
    p_BHS = log_p_BHS.exp()
    summands_BHS = p_BHS * delta_BHS
    d_sink_H = -summands_BHS.sum((0, 2))
    return d_sink_H.to(sink_H.dtype)


def first_visible_key(q_BSHD: Tensor, ahead: int, window: int, begins_BS: Tensor | None) -> Tensor:
    """The position of the first key that each query sees: the first of its document or, if later, of its window. The
    first query is `ahead` positions behind the first key."""
    b, s = q_BSHD.shape[:2]
    if begins_BS is None:
        first_BS = q_BSHD.new_zeros(b, s, dtype=torch.int32)
    else:
        first_BS = begins_BS.int().contiguous()
    if not window:
        return first_BS
    position_S = torch.arange(ahead, ahead + s, dtype=torch.int32, device=q_BSHD.device)
    first_of_window_S = position_S - (window - 1)
    return first_BS.maximum(first_of_window_S)


def visible_until_query(first_BS: Tensor, length: int) -> Tensor:
    """For each key, the number of queries whose first visible key is not behind it: later queries do not see it."""
    position_L = torch.arange(length, dtype=torch.int32, device=first_BS.device)
    sequences = len(first_BS)
    position_BL = position_L.expand(sequences, -1).contiguous()
    return torch.searchsorted(first_BS, position_BL, right=True, out_int32=True)
