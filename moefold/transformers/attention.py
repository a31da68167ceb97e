"""Attention of transformers' models by moefold's op: `attn_implementation="moefold"`.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.config.errors import UserError
from moefold.kernels.attention.attention import attention, scale_or_default, sink_as_first_key
from moefold.kernels.facts import AttentionShape
from moefold.transformers.kernels import attention_kernels

AttentionOutput = tuple[Tensor, None]  # (B, S, H, V), and no probabilities
SdpaForward = Callable[..., AttentionOutput]


def attend(
    sdpa: SdpaForward,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> AttentionOutput:
    """Causal attention without a mask runs on moefold's op, anything else on `sdpa`, transformers' own. `s_aux`: a sink
    for each head."""
    refuse_softcap(further)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    queries = query.shape[2]
    sees_all = is_causal or queries == 1
    needs_sdpa = dropout or further.get("position_bias") is not None or further.get("cache") is not None
    is_plain = sees_all and attention_mask is None and not needs_sdpa
    if s_aux is None and (not is_plain or torch.compiler.is_compiling()):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa(module, query, key, value, attention_mask, **options, **further)
    if queries > 1 and attention_mask is None:
        key = key[:, :, :queries]  # of a static cache that was empty: no query sees further
        value = value[:, :, :queries]
    heads = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if is_plain and torch.compiler.is_compiling():  # moefold's op cannot be traced, SDPA with a mask can
        attention_mask = causal_mask(query, key)
        is_plain = False
    if is_plain:
        return attend_to_all(*heads, scaling, s_aux), None
    assert s_aux is not None, "masks without sinks are left to SDPA"
    if needs_sdpa or attention_mask is None:
        raise UserError(
            'attn_implementation="moefold" has sinks in causal attention alone, without dropout; set '
            'attn_implementation="eager" for this model'
        )
    return attend_with_mask(*heads, attention_mask, scaling, s_aux), None


def refuse_softcap(further: dict[str, Any]) -> None:
    if further.get("softcap") is not None:
        raise UserError(
            f'softcap={further["softcap"]} is not supported by attn_implementation="moefold"; set '
            'attn_implementation="eager" for this model'
        )


def attend_to_all(q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, scale: float | None, sink_H: Tensor | None) -> Tensor:
    queries, heads, width = q_BSHD.shape[1:]
    keys, kv_heads, value_width = v_BLGV.shape[1:]
    shape = AttentionShape(keys, heads, kv_heads, width, value_width)
    plain = sink_H is None and queries == keys
    kernels = attention_kernels(q_BSHD.device, q_BSHD.dtype, shape, plain)
    return kernels[attention](q_BSHD, k_BLGD, v_BLGV, scale, 0, sink_H)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """(S, L), true for keys that a query sees. The last query sees all keys."""
    queries = query.shape[2]
    keys = key.shape[2]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return ones.tril(keys - queries)


def attend_with_mask(
    q_BSHD: Tensor, k_BLGD: Tensor, v_BLGV: Tensor, mask: Tensor, scale: float | None, sink_H: Tensor
) -> Tensor:
    """The sink as a key that no mask hides. `mask`: (B, 1, S, L) or (S, L), true for keys that a query sees."""
    scale = scale_or_default(scale, q_BSHD)
    score_H = sink_H / scale
    q, k, v = sink_as_first_key(q_BSHD, k_BLGD, v_BLGV, score_H)
    is_bool = mask.dtype == torch.bool
    seen = F.pad(mask, (1, 0), value=float(is_bool))  # a mask of numbers is added to the scores
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out_BHSV = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
    return out_BHSV.transpose(1, 2)
