"""OLMoE: queries and keys are normed over all heads together; routing weights are not normalised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.family import Family, read_heads, read_stream, write_stream
from moefold.checkpoint.hf.names import experts, grouped_attention, norms, router, table_of
from moefold.checkpoint.hf.options import Options
from moefold.checkpoint.hf.piece import Piece
from moefold.config.run import ModelConfig


def read(options: Options) -> dict[str, Any]:
    values = read_stream(options, theta=10_000.0, eps=1e-5)
    heads = read_heads(options, values)
    bias = options.take("attention_bias", default=False)
    if options.optional("clip_qkv") is not None:
        options.refuse("clip_qkv is not supported; expected none: queries, keys and values are not cut off")
    return (
        values
        | heads
        | {
            "attention.qk_norm": "full",
            "attention.qkv_bias": bias,
            "attention.out_bias": bias,
            "moe.experts": options.take("num_experts", "num_local_experts"),
            "moe.top_k": options.take("num_experts_per_tok"),
            "moe.ffn": options.take("intermediate_size"),
            "moe.normalize": "chosen" if options.take("norm_topk_prob", default=False) else "none",
            "moe.aux_loss": options.take("router_aux_loss_coef", default=0.01),
        }
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """A head's width is the stream's share; the family has no option for another."""
    return {
        **write_stream(model),
        "num_key_value_heads": model.attention.kv_heads,
        "attention_bias": model.attention.qkv_bias,
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn,
        "norm_topk_prob": model.moe.normalize == "chosen",
        "router_aux_loss_coef": model.moe.aux_loss,
    }


def block(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Piece]:
    yield from norms(model, layer, theirs, ours)
    yield from grouped_attention(model, theirs, ours)
    yield from router(model, theirs + "mlp.", ours + "moe.")
    yield from experts(model, theirs + "mlp.", ours + "moe.")


OLMOE = Family("olmoe", "OlmoeForCausalLM", read, write, lambda model: table_of(model, block))
