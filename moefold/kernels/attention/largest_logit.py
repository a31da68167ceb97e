"""The largest attention logit of each query head: the most that q k^T x scale comes to, over all keys a query sees.

Computed apart from attention, whose kernels do not return it: half of the products of attention's forward once more.
The reference works in chunks of queries: the scores of one chunk are alive at a time. Letters as in attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.attention.attention import (
    attention_mask,
    random_document_begins,
    repeated_heads,
    scale_or_default,
)
from moefold.kernels.facts import AttentionShape
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

QUERY_CHUNK = 512  # queries whose scores are computed at once


@register_inner_op
def largest_logit(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    scale: float | None = None,
    window: int = 0,
    begins_BS: Tensor | None = None,
    ahead: int | None = None,
) -> Tensor:
    """largest_H in fp32 or better; -inf of a head whose queries see none of the keys. The first query is `ahead`
    positions behind the first key; by default the S queries are the last of the L positions. `begins_BS` is the
    position of the first key that a query may see; it never decreases from one query to the next."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    heads = q_BSHD.shape[2]
    q_BHSD = q_BSHD.transpose(1, 2)
    q_BHSD = q_BHSD.to(wide)
    k_BHLD = repeated_heads(k_BLGD, heads, wide)
    queries = q_BHSD.shape[2]
    keys = k_BHLD.shape[2]
    ahead = queries_ahead(q_BSHD, k_BLGD, ahead)
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


def queries_ahead(q_BSHD: Tensor, k_BLGD: Tensor, ahead: int | None) -> int:
    if ahead is not None:
        return ahead
    queries = q_BSHD.shape[1]
    keys = k_BLGD.shape[1]
    return keys - queries


@largest_logit.register_fast("triton")
def largest_logit_triton(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    scale: float | None = None,
    window: int = 0,
    begins_BS: Tensor | None = None,
    ahead: int | None = None,
) -> Tensor:
    from moefold.kernels.attention.largest_logit_triton import launch_largest_logit

    ahead = queries_ahead(q_BSHD, k_BLGD, ahead)
    largest_H = launch_largest_logit(q_BSHD, k_BLGD, window, begins_BS, ahead)
    return largest_H * scale_or_default(scale, q_BSHD)


LOGIT_SHAPES = [  # B, S, L, H, G, D, window, positions that the queries are ahead
    (1, 1, 1, 1, 1, 8, 0, None),
    (1, 7, 7, 2, 2, 8, 0, None),
    (2, 5, 9, 4, 2, 16, 0, None),
    (2, 12, 12, 4, 1, 8, 3, None),
    (1, 140, 140, 2, 1, 24, 0, None),  # 16 + 8 columns
    (2, 70, 161, 2, 2, 192, 0, None),  # 128 + 64 columns, as in latent attention
    (1, 270, 270, 2, 1, 64, 100, None),
    (1, 130, 130, 2, 1, 128, 0, 130),  # blocks of a ring
    (1, 96, 96, 2, 1, 16, 100, 96),
]


@largest_logit.register_cases
def largest_logit_cases(draw: CaseInputs) -> Cases:
    for b, s, keys, h, g, d, window, ahead in LOGIT_SHAPES:
        q = draw.normal(b, s, h, d)
        k = draw.normal(b, keys, g, d, seed=1)
        name = f"{b} x {s} of {keys}, {h}/{g} heads of {d}, window {window}"
        shape = AttentionShape(keys, h, g, d, d)
        if ahead is not None:
            name += f", {ahead} ahead"
        inputs = (q, k, 0.3, window, None, ahead)
        yield KernelCase(name, inputs, attention=shape)
        device = draw.device
        positions = queries_ahead(q, k, ahead) + s
        begins = random_document_begins(device, b, positions)
        inputs = (q, k, None, window, begins[:, -s:], ahead)
        yield KernelCase(f"{name}, documents", inputs, attention=shape)
