"""Causal attention with grouped queries: each key and value head serves a group of query heads.

A query sees a run of keys that ends with its own: from the first of the sequence, of its document or of its window.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from moefold.kernels.attention.masked import MaskedAttentionFunction
from moefold.kernels.attention.timings import AttentionShape
from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def attention(
    q_BSHD: torch.Tensor,
    k_BLGD: torch.Tensor,
    v_BLGV: torch.Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: torch.Tensor | None = None,
    begins_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T x scale, causal) v, scores in fp32 or better. The S queries are the last of the L positions.

    `scale` is 1 / sqrt(D) if not said. With a `window`, a query sees that many keys, its own included. `sink_H` is one
    more score for each head that no key has: it takes its part of the softmax and gives nothing. `begins_BS` is the
    place of the first key that a query may see; it never falls from one query to the next.
    """
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = k.shape[2] - q.shape[2]
    scores = scores.masked_fill(~attention_mask(q.shape[2], k.shape[2], ahead, window, q.device, begins_BS), -torch.inf)
    if sink_H is not None:
        sink = sink_H.to(wide)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    out = scores.softmax(-1)[..., : k.shape[2]] @ v
    return out.transpose(1, 2).to(q_BSHD.dtype)


def heads_first(q_BSHD, k_BLGD, v_BLGV, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, H, positions, D) each, key and value heads repeated for their group of queries."""
    group = q_BSHD.shape[2] // k_BLGD.shape[2]
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q_BSHD, k_BLGD, v_BLGV))
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def attention_mask(
    queries: int, keys: int, ahead: int, window: int, device: torch.device, begins_BS: torch.Tensor | None = None
) -> torch.Tensor:
    """(S, L), or (B, 1, S, L) where documents begin: which keys a query sees, the first query standing `ahead` places
    behind the first key."""
    places = torch.arange(keys, device=device)
    back = torch.arange(queries, device=device)[:, None] + ahead - places
    mask = (back >= 0) & (back < window) if window else back >= 0
    return mask if begins_BS is None else mask & (places >= begins_BS[:, None, :, None])


@attention.register_fast("sdpa")
def attention_sdpa(
    q_BSHD: torch.Tensor,
    k_BLGD: torch.Tensor,
    v_BLGV: torch.Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: torch.Tensor | None = None,
    begins_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torch chooses. Key and value heads are not repeated where it has a way without."""
    factor: float = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    if sink_H is not None:
        q_BSHD, k_BLGD, v_BLGV = sink_as_first_key(q_BSHD, k_BLGD, v_BLGV, sink_H / factor)
        begins_BS = None if begins_BS is None else begins_BS + 1
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BLGD, v_BLGV))
    grouped = q.shape[1] != k.shape[1]
    square = q.shape[2] == k.shape[2] and not window and begins_BS is None
    mask = (
        None if square else sdpa_attention_mask(q.shape[2], k.shape[2], window, sink_H is not None, q.device, begins_BS)
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=factor, enable_gqa=grouped)
    return out.transpose(1, 2)


def sink_as_first_key(q_BSHD, k_BLGD, v_BLGV, score_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sink as a first key: heads get more dims, in which that key alone is one and every query has its head's
    score. So any attention can do it, and the score's gradient comes by itself. Eight dims, as kernels like it."""
    b, s, h, _ = q_BSHD.shape
    score = F.pad(score_H.to(q_BSHD.dtype)[:, None], (0, 7))
    q = torch.cat((q_BSHD, score.expand(b, s, h, 8)), dim=-1)
    k, v = F.pad(k_BLGD, (0, 8)), F.pad(v_BLGV, (0, 0, 0, 0, 1, 0))
    first = torch.zeros_like(k[:, :1])
    first[..., k_BLGD.shape[-1]] = 1
    return q, torch.cat((first, k), dim=1), v


def sdpa_attention_mask(
    queries: int, keys: int, window: int, sink: bool, device: torch.device, begins_BS: torch.Tensor | None
):
    """What SDPA needs where its own causal mask does not do: lower right, or with a window or documents, which never
    hide a sink."""
    if not window and begins_BS is None:
        return causal_lower_right(queries, keys)
    mask = attention_mask(queries, keys, keys - queries, window, device, begins_BS)
    if sink:
        mask[..., 0] = True
    return mask


def is_plain_causal(q_BSHD: torch.Tensor, k_BLGD: torch.Tensor, window=0, sink_H=None, begins_BS=None) -> bool:
    """Whether every query sees all positions up to its own and nothing else, as most do."""
    return q_BSHD.shape[1] == k_BLGD.shape[1] and not window and sink_H is None and begins_BS is None


@attention.register_fast("cudnn")
def _(q_BSHD, k_BLGD, v_BLGV, scale=None, *narrowed) -> torch.Tensor:
    if not is_plain_causal(q_BSHD, k_BLGD, *narrowed):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale, *narrowed)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale)


@attention.register_fast("flash")
def _(q_BSHD, k_BLGD, v_BLGV, scale=None, *narrowed) -> torch.Tensor:
    if not is_plain_causal(q_BSHD, k_BLGD, *narrowed):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale, *narrowed)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale)


@attention.register_fast("ordered")
def _(q_BSHD, k_BLGD, v_BLGV, scale=None, *narrowed) -> torch.Tensor:
    if not is_plain_causal(q_BSHD, k_BLGD, *narrowed):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale, *narrowed)
    factor: float = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    return DeterministicAttention.apply(q_BSHD, k_BLGD, v_BLGV, factor)  # pyright: ignore[reportReturnType]


class DeterministicAttention(torch.autograd.Function):
    """Forward by cuDNN where it has Hopper's, else flash; backward by kernels that add up in a fixed order."""

    @staticmethod
    def forward(ctx, q_BSHD, k_BLGD, v_BLGV, scale: float):
        q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BLGD, v_BLGV))
        if torch.cuda.get_device_capability(q.device)[0] == 9:
            y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True, False, scale=scale
            )
        else:
            y, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        y_BSHD = y.transpose(1, 2)
        ctx.save_for_backward(q_BSHD, k_BLGD, v_BLGV, y_BSHD, lse.view(q.shape[:3]))
        ctx.scale = scale
        return y_BSHD

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.attention.backward_triton import attention_backward

        q, k, v, y, lse = ctx.saved_tensors
        return (*attention_backward(gradients[0], q, k, v, y, lse, ctx.scale), None)


@attention.register_fast("spans")
def _(q_BSHD, k_BLGD, v_BLGV, scale=None, window=0, sink_H=None, begins_BS=None) -> torch.Tensor:
    factor: float = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    return MaskedAttentionFunction.apply(q_BSHD, k_BLGD, v_BLGV, factor, window, sink_H, begins_BS)  # pyright: ignore[reportReturnType]


@attention.register_cases
def _(device: str, dtype: torch.dtype):
    sizes = [
        (1, 1, 1, 1, 1, 8, 8),
        (2, 33, 33, 4, 2, 16, 16),
        (1, 64, 64, 6, 6, 32, 32),
        (1, 257, 257, 4, 1, 64, 64),
        (2, 16, 48, 4, 2, 16, 16),
        (2, 24, 24, 4, 4, 24, 16),
        (2, 300, 300, 4, 2, 128, 128),
    ]
    for b, s, length, h, g, d, dv in sizes:
        q, k = seeded_randn(device, dtype, b, s, h, d), seeded_randn(device, dtype, b, length, g, d, seed=1)
        v, sink = seeded_randn(device, dtype, b, length, g, dv, seed=2), seeded_randn(device, dtype, h, seed=3)
        begins = random_document_begins(device, b, length)[:, -s:]
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}" + (f", values of {dv}" if dv != d else "")
        shape = AttentionShape(length, h, g, d, dv)
        yield KernelCase(name, (q, k, v), attention=shape)
        case = partial(KernelCase, attention=shape, sees_all=False)
        yield case(f"{name}, sinks", (q, k, v, 0.3, 0, sink))
        yield case(f"{name}, documents", (q, k, v, None, 0, None, begins))
        yield case(f"{name}, documents, window 7, sinks", (q, k, v, 0.3, 7, sink, begins))
        for window in (1, 7):
            yield case(f"{name}, window {window}", (q, k, v, None, window, None))
            yield case(f"{name}, window {window}, sinks", (q, k, v, None, window, sink))


def random_document_begins(device: str, sequences: int, length: int) -> torch.Tensor:
    """Where the document of each position begins: some of one token, some of many, other borders in every sequence."""
    generator = torch.Generator().manual_seed(length)
    chance = torch.rand(sequences, length, generator=generator)
    starts = (chance < 0.04) | (chance > 0.99).roll(1, dims=1) | (chance > 0.99)
    starts[:, 0] = True
    return torch.where(starts, torch.arange(length), 0).cummax(1).values.int().to(device)
