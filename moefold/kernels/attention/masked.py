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

        queries = q_BSHD.shape[1]
        keys = k_BLGD.shape[1]
        ahead = keys - queries
        first_BS = first_visible_key(q_BSHD, ahead, window, begins_BS)
        heads = (q_BSHD, k_BLGD, v_BLGV)
        found = masked_attention_forward(*heads, first_BS, sink_H, scale, ahead)
        ctx.save_for_backward(*heads, sink_H, first_BS, *found)
        ctx.scale = scale
        y_BSHV, _ = found
        return y_BSHV

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.attention.masked_triton import masked_attention_backward

        q, k, v, sink_H, first_BS, y, lse_BHS = ctx.saved_tensors
        queries = q.shape[1]
        keys = k.shape[1]
        ahead = keys - queries
        until_BL = visible_until_query(first_BS, keys)
        delta_BHS = torch.empty_like(lse_BHS)
        dy = gradients[0]
        heads = (dy, q, k, v)
        ranges = (first_BS, until_BL)
        sums = (lse_BHS, delta_BHS)
        scale = ctx.scale
        found = masked_attention_backward(*heads, *ranges, y, *sums, scale, ahead)
        d_sink = sink_gradient(sink_H, lse_BHS, delta_BHS)
        return *found, None, None, d_sink, None


def sink_gradient(sink_H: Tensor | None, lse_BHS: Tensor, delta_BHS: Tensor) -> Tensor | None:
    """The sink's value is zero, so its dP is zero and dS = -P delta."""
    if sink_H is None:
        return None
    wide_H = sink_H.to(lse_BHS.dtype)
    wide_H1 = wide_H[:, None]
    log_p_BHS = wide_H1 - lse_BHS
    p_BHS = log_p_BHS.exp()
    summands_BHS = p_BHS * delta_BHS
    sum_H = summands_BHS.sum((0, 2))
    d_sink_H = -sum_H
    dtype = sink_H.dtype
    return d_sink_H.to(dtype)


def first_visible_key(q_BSHD: Tensor, ahead: int, window: int, begins_BS: Tensor | None) -> Tensor:
    """The position of the first key that each query sees: the first of its document or, if later, of its window. The
    first query is `ahead` positions behind the first key."""
    b, s, _, _ = q_BSHD.shape
    if begins_BS is None:
        first_BS = q_BSHD.new_zeros(b, s, dtype=torch.int32)
    else:
        begins_BS = begins_BS.int()
        first_BS = begins_BS.contiguous()
    if not window:
        return first_BS
    device = first_BS.device
    query_S = torch.arange(s, dtype=torch.int32, device=device)
    position_S = query_S + ahead
    first_of_window_S = position_S - (window - 1)
    return first_BS.maximum(first_of_window_S)


def visible_until_query(first_BS: Tensor, length: int) -> Tensor:
    """For each key, the number of queries whose first visible key is not behind it: later queries do not see it."""
    device = first_BS.device
    position_L = torch.arange(length, dtype=torch.int32, device=device)
    sequences = len(first_BS)
    position_BL = position_L.repeat(sequences, 1)
    return torch.searchsorted(first_BS, position_BL, right=True, out_int32=True)
