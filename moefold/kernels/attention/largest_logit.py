"""The largest attention logit of each query head: the most that q k^T x scale comes to, over all keys a query sees.

Computed apart from attention, for kernels that do not return it, in chunks of queries: the scores of one chunk are
alive at a time. Letters as in attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.attention.attention import attention_mask, repeated_heads, scale_or_default
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

QUERY_CHUNK = 512  # queries whose scores are computed at once


@register_inner_op
def largest_logit(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    scale: float | None = None,
    window: int = 0,
    begins_BS: Tensor | None = None,
) -> Tensor:
    """largest_H in fp32 or better. The S queries are the last of the L positions."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    heads = q_BSHD.shape[2]
    q_BHSD = q_BSHD.transpose(1, 2)
    q_BHSD = q_BHSD.to(wide)
    k_BHLD = repeated_heads(k_BLGD, heads, wide)
    queries = q_BHSD.shape[2]
    keys = k_BHLD.shape[2]
    ahead = keys - queries
    largest_H = q_BHSD.new_full((heads,), -torch.inf)
    for first in range(0, queries, QUERY_CHUNK):
        end = first + QUERY_CHUNK
        chunk = slice(first, end)
        q_chunk = q_BHSD[:, :, chunk]
        begins = None
        if begins_BS is not None:
            begins = begins_BS[:, chunk]
        count = q_chunk.shape[2]
        device = q_chunk.device
        visible = attention_mask(count, keys, ahead + first, window, device, begins)
        hidden = ~visible
        scores = q_chunk @ k_BHLD.mT
        scores = scores.masked_fill(hidden, -torch.inf)
        largest_of_chunk_H = scores.amax(dim=(0, 2, 3))
        largest_H = largest_H.maximum(largest_of_chunk_H)
    return largest_H * scale_or_default(scale, q_BSHD)


LOGIT_SHAPES = [  # B, S, L, H, G, D, window
    (1, 7, 7, 2, 2, 8, 0),
    (2, 5, 9, 4, 2, 16, 0),
    (2, 12, 12, 4, 1, 8, 3),
]


@largest_logit.register_cases
def largest_logit_cases(draw: CaseInputs) -> Cases:
    for b, s, keys, h, g, d, window in LOGIT_SHAPES:
        q = draw.normal(b, s, h, d)
        k = draw.normal(b, keys, g, d, seed=1)
        name = f"{b} x {s} of {keys}, {h}/{g} heads of {d}, window {window}"
        inputs = (q, k, 0.3, window, None)
        yield KernelCase(name, inputs)
    device = draw.device
    begins = torch.tensor([[0, 0, 2, 2, 4]], device=device)
    q = draw.normal(1, 5, 2, 8)
    k = draw.normal(1, 5, 2, 8, seed=1)
    inputs = (q, k, None, 0, begins)
    yield KernelCase("documents", inputs)
