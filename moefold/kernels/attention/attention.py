"""Causal attention with grouped queries: each key/value head serves a group of query heads.

A query sees a range of keys that ends with its own: from the first key of the sequence, of its document or of its
window.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moefold.kernels.attention.by_document import DocumentAttention, attend_by_document
from moefold.kernels.attention.masked import MaskedAttentionFunction
from moefold.kernels.facts import AttentionShape
from moefold.kernels.linear.product import widened
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op

ThreeHeads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
SINK_DIMS = 8  # dims added to heads for a sink as a key: kernels need a multiple of 8


@register_op
def attention(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: Tensor | None = None,
    begins_BS: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T x scale, causal) v, scores in fp32 or better. The S queries are the last of the L positions.

    `scale` is 1 / sqrt(D) by default. With a `window`, a query sees that many keys, its own included. `sink_H` is one
    more logit for each head: it joins the softmax and has no value. `begins_BS` is the position of the first key that a
    query may see; it never decreases from one query to the next.
    """
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    queries = q.shape[2]
    keys = k.shape[2]
    scores = q @ k.mT
    scores = scores * scale_or_default(scale, q)
    ahead = keys - queries
    device = q.device
    visible = attention_mask(queries, keys, ahead, window, device, begins_BS)
    hidden = ~visible
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink_H is not None:
        scores = with_sink(scores, sink_H)
    p = scores.softmax(-1)
    p_of_keys = p[..., :keys]
    out = p_of_keys @ v
    out_BSHV = out.transpose(1, 2)
    return out_BSHV.to(q_BSHD.dtype)


def with_sink(scores_BHSL: Tensor, sink_H: Tensor) -> Tensor:
    """Scores with one more column: the head's sink."""
    sink = sink_H.to(scores_BHSL.dtype)
    sink = sink[:, None, None]
    rows = scores_BHSL.shape[:-1]
    column = sink.expand(*rows, 1)
    both = (scores_BHSL, column)
    return torch.cat(both, dim=-1)


def scale_or_default(scale: float | None, q: Tensor) -> float:
    if scale is not None:
        return scale
    width = q.shape[-1]
    return width**-0.5


def heads_first(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, wide: torch.dtype) -> ThreeHeads:
    """(B, H, positions, D) each, key/value heads repeated for their group of query heads."""
    q_BHSD = q_BSHD.transpose(1, 2)
    q = q_BHSD.to(wide)
    heads = q.shape[1]
    k = repeated_heads(k_BLGD, heads, wide)
    v = repeated_heads(v_BLGV, heads, wide)
    return q, k, v


def repeated_heads(x_BLGD: Tensor, heads: int, wide: torch.dtype) -> Tensor:
    """(B, H, L, D): key/value heads repeated until there are as many as query heads."""
    x_BGLD = x_BLGD.transpose(1, 2)
    x = x_BGLD.to(wide)
    group = heads // x.shape[1]
    return x.repeat_interleave(group, dim=1)


def attention_mask(
    queries: int,
    keys: int,
    ahead: int,
    window: int,
    device: torch.device,
    begins_BS: Tensor | None = None,
) -> Tensor:
    """(S, L), or (B, 1, S, L) with documents: which keys a query sees. The first query is `ahead` positions behind the
    first key."""
    key_L = torch.arange(keys, device=device)
    query_S = torch.arange(queries, device=device)
    query_S = query_S + ahead
    distance = query_S[:, None] - key_L
    visible = distance >= 0
    if window:
        in_window = distance < window
        visible = visible & in_window
    if begins_BS is None:
        return visible
    begins_B1S1 = begins_BS[:, None, :, None]
    in_document = key_L >= begins_B1S1
    return visible & in_document


@attention.register_fast("invariant")
def attention_invariant(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: Tensor | None = None,
    begins_BS: Tensor | None = None,
) -> Tensor:
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    sink = None if sink_H is None else sink_H.to(wide)
    scale = scale_or_default(scale, q)
    attend = DocumentAttention(scale, window, sink)
    y_BHSV = attend_by_document(q, k, v, attend, begins_BS)
    y_BSHV = y_BHSV.transpose(1, 2)
    return y_BSHV.to(q_BSHD.dtype)


@attention.register_fast("sdpa")
def attention_sdpa(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: Tensor | None = None,
    begins_BS: Tensor | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention, which chooses a backend itself and need not repeat key/value heads."""
    scale = scale_or_default(scale, q_BSHD)
    has_sink = sink_H is not None
    if sink_H is not None:
        score_H = sink_H / scale
        q_BSHD, k_BLGD, v_BLGV = sink_as_first_key(q_BSHD, k_BLGD, v_BLGV, score_H)
        if begins_BS is not None:
            begins_BS = begins_BS + 1
    # A sink is one of the keys by now: the mask alone must know of it.
    mask = None
    square = is_plain_causal(q_BSHD, k_BLGD, window, None, begins_BS)
    if not square:
        mask = sdpa_attention_mask(q_BSHD, k_BLGD, window, has_sink, begins_BS)
    q = widened(q_BSHD).transpose(1, 2)
    k = widened(k_BLGD).transpose(1, 2)
    v = widened(v_BLGV).transpose(1, 2)
    heads = q.shape[1]
    kv_heads = k.shape[1]
    grouped = heads != kv_heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=grouped)
    out_BSHV = out.transpose(1, 2)
    return out_BSHV.to(q_BSHD.dtype)


def sink_as_first_key(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, score_H: Tensor) -> ThreeHeads:
    """The sink as a first key with value zero. Heads get more dims: in the first of them that key alone is one, and
    every query has its head's score. So any attention can do it, and autograd gives the score's gradient."""
    b, s, h, d = q_BSHD.shape
    # Queries: the score, then zeros.
    score_H = score_H.to(q_BSHD.dtype)
    score_H1 = score_H[:, None]
    zeros_behind = SINK_DIMS - 1
    padded_score = F.pad(score_H1, (0, zeros_behind))
    further_dims = padded_score.expand(b, s, h, SINK_DIMS)
    all_dims = (q_BSHD, further_dims)
    q = torch.cat(all_dims, dim=-1)
    # Keys: zeros in the further dims, but for the sink.
    k = F.pad(k_BLGD, (0, SINK_DIMS))
    first_key = k[:, :1]
    sink_key = torch.zeros_like(first_key)
    sink_key[..., d].fill_(1)
    all_keys = (sink_key, k)
    k = torch.cat(all_keys, dim=1)
    # Values: zeros for the sink.
    one_before = (0, 0, 0, 0, 1, 0)
    v = F.pad(v_BLGV, one_before)
    return q, k, v


def sdpa_attention_mask(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    window: int,
    sink: bool,
    begins_BS: Tensor | None,
) -> Tensor | None:
    """The mask where SDPA's own causal mask does not fit: lower right, or with a window or documents, which never hide
    a sink. None where one query sees all keys. A GPU has kernels for a lower right mask that is described, not made."""
    queries = q_BSHD.shape[1]
    keys = k_BLGD.shape[1]
    is_causal = not window and begins_BS is None
    if is_causal and queries == 1:
        return None
    if is_causal and q_BSHD.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, three seconds for few runs

        return causal_lower_right(queries, keys)
    ahead = keys - queries
    device = q_BSHD.device
    mask = attention_mask(queries, keys, ahead, window, device, begins_BS)
    if sink:
        mask[..., 0].fill_(True)
    return mask


def is_plain_causal(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    window: int = 0,
    sink_H: Tensor | None = None,
    begins_BS: Tensor | None = None,
) -> bool:
    """Whether every query sees all positions up to its own and nothing else, the usual case."""
    if window or sink_H is not None or begins_BS is not None:
        return False
    queries = q_BSHD.shape[1]
    keys = k_BLGD.shape[1]
    return queries == keys


PlainAttention = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def sdpa_unless_plain(plain: PlainAttention) -> Callable[..., Tensor]:
    """An implementation of attention from one that is causal and no more: anything else, and a sequence of one
    position, is left to SDPA."""

    @wraps(plain)
    def plain_or_sdpa(
        q_BSHD: Tensor,
        k_BLGD: Tensor,
        v_BLGV: Tensor,
        scale: float | None = None,
        window: int = 0,
        sink_H: Tensor | None = None,
        begins_BS: Tensor | None = None,
    ) -> Tensor:
        one_position = q_BSHD.shape[1] == 1  # cuDNN refuses it
        is_plain = is_plain_causal(q_BSHD, k_BLGD, window, sink_H, begins_BS)
        if is_plain and not one_position:
            return plain(q_BSHD, k_BLGD, v_BLGV, scale)
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale, window, sink_H, begins_BS)

    return plain_or_sdpa


@attention.register_fast("cudnn")
@sdpa_unless_plain
def attention_cudnn(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float | None) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale)


@attention.register_fast("flash")
@sdpa_unless_plain
def attention_flash(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float | None) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention_sdpa(q_BSHD, k_BLGD, v_BLGV, scale)


@attention.register_fast("deterministic")
@sdpa_unless_plain
def attention_deterministic(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float | None) -> Tensor:
    scale = scale_or_default(scale, q_BSHD)
    return DeterministicAttention.apply(q_BSHD, k_BLGD, v_BLGV, scale)  # pyright: ignore[reportReturnType]


class DeterministicAttention(torch.autograd.Function):
    """Forward by cuDNN on Hopper, elsewhere by flash; backward by kernels that add up in a fixed order."""

    @staticmethod
    def forward(ctx, q_BSHD, k_BLGD, v_BLGV, scale: float):
        q = q_BSHD.transpose(1, 2)
        k = k_BLGD.transpose(1, 2)
        v = v_BLGV.transpose(1, 2)
        major, _ = torch.cuda.get_device_capability(q.device)
        if major == 9:
            attend = torch.ops.aten._scaled_dot_product_cudnn_attention
            y, lse, *_ = attend(q, k, v, None, True, 0.0, True, False, scale=scale)
        else:
            attend = torch.ops.aten._scaled_dot_product_flash_attention
            y, lse, *_ = attend(q, k, v, 0.0, True, False, scale=scale)
        y_BSHD = y.transpose(1, 2)
        by_query = q.shape[:3]
        lse_BHS = lse.view(by_query)
        ctx.save_for_backward(q_BSHD, k_BLGD, v_BLGV, y_BSHD, lse_BHS)
        ctx.scale = scale
        return y_BSHD

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.attention.backward_triton import attention_backward

        q, k, v, y, lse = ctx.saved_tensors
        dy = gradients[0]
        scale = ctx.scale
        found = attention_backward(dy, q, k, v, y, lse, scale)
        return *found, None


@attention.register_fast("varlen")
def attention_varlen(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_H: Tensor | None = None,
    begins_BS: Tensor | None = None,
) -> Tensor:
    scale = scale_or_default(scale, q_BSHD)
    inputs = (q_BSHD, k_BLGD, v_BLGV, scale, window, sink_H, begins_BS)
    return MaskedAttentionFunction.apply(*inputs)  # pyright: ignore[reportReturnType]


ATTENTION_CASE_SIZES = [  # B, S, L, H, G, D, V
    (1, 1, 1, 1, 1, 8, 8),
    (2, 33, 33, 4, 2, 16, 16),
    (1, 64, 64, 6, 6, 32, 32),
    (1, 257, 257, 4, 1, 64, 64),
    (2, 16, 48, 4, 2, 16, 16),
    (2, 1, 20, 4, 2, 16, 16),
    (2, 24, 24, 4, 4, 24, 16),
    (2, 300, 300, 4, 2, 128, 128),
]


@attention.register_cases
def attention_cases(draw: CaseInputs) -> Cases:
    for b, s, length, h, g, d, dv in ATTENTION_CASE_SIZES:
        q = draw.normal(b, s, h, d)
        k = draw.normal(b, length, g, d, seed=1)
        v = draw.normal(b, length, g, dv, seed=2)
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}"
        if dv != d:
            name += f", values of {dv}"
        shape = AttentionShape(length, h, g, d, dv)
        square = s == length
        inputs = (q, k, v)
        yield KernelCase(name, inputs, attention=shape, square=square)
        sink = draw.normal(h, seed=3)
        device = draw.device
        begins = random_document_begins(device, b, length)
        begins_of_queries = begins[:, -s:]
        masked = maskings(sink, begins_of_queries)
        for about, masking in masked.items():
            case_name = f"{name}, {about}"
            inputs = (q, k, v, *masking)
            yield KernelCase(case_name, inputs, attention=shape, sees_all=False, square=square)


Masking = tuple[object, ...]  # scale, window, sink, documents


def maskings(sink: Tensor, begins: Tensor) -> dict[str, Masking]:
    """Maskings by what they are."""
    return {
        "sinks": (0.3, 0, sink),
        "documents": (None, 0, None, begins),
        "documents, window 7, sinks": (0.3, 7, sink, begins),
        "window 1": (None, 1, None),
        "window 1, sinks": (None, 1, sink),
        "window 7": (None, 7, None),
        "window 7, sinks": (None, 7, sink),
    }


def random_document_begins(device: str, sequences: int, length: int) -> Tensor:
    """The first position of each position's document: documents of one token and of many, other borders in every
    sequence."""
    generator = torch.Generator()
    generator.manual_seed(length)
    chance = torch.rand(sequences, length, generator=generator)
    one_token = chance > 0.99
    behind_one_token = one_token.roll(1, dims=1)
    others = chance < 0.04
    starts = others | behind_one_token | one_token
    starts[:, 0] = True
    position = torch.arange(length)
    start_or_zero = torch.where(starts, position, 0)
    latest_start = start_or_zero.cummax(1)
    begins = latest_start.values.int()
    return begins.to(device)
