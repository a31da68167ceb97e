"""Qwen3-MoE: grouped queries with a norm on each head, experts in every layer or every so many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.anatomy.steps import is_moe
from moefold.checkpoint.hf.family import (
    Family,
    read_heads,
    read_sparse_layers,
    read_stream,
    read_windows,
    write_heads,
    write_sparse_layers,
    write_stream,
)
from moefold.checkpoint.hf.names import experts, gated_mlp, grouped_attention, norms, router, table_of
from moefold.checkpoint.hf.options import Options
from moefold.checkpoint.hf.piece import Piece
from moefold.config.run import ModelConfig


def read(options: Options) -> dict[str, Any]:
    values = read_stream(options, theta=10_000.0, eps=1e-6)
    values |= read_heads(options, values) | read_sparse_layers(options, values["layers"])
    window = options.optional("sliding_window")
    sliding = options.take("use_sliding_window", default=False)
    values |= read_windows(options, values["layers"], window if sliding else None, None)
    options.ignore(["max_window_layers"])  # Qwen3-MoE's own code does not look at it
    bias = options.take("attention_bias", default=False)
    return values | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "dense_ffn": options.take("intermediate_size", default=6144),
        "moe.experts": options.take("num_experts", "num_local_experts"),
        "moe.top_k": options.take("num_experts_per_tok"),
        "moe.ffn": options.take("moe_intermediate_size"),
        "moe.normalize": "chosen" if options.take("norm_topk_prob", default=False) else "none",
        "moe.aux_loss": options.take("router_aux_loss_coef", default=0.001),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_stream(model),
        **write_heads(model),
        **write_sparse_layers(model),
        "attention_bias": model.attention.qkv_bias,
        "use_sliding_window": model.attention.window > 0,
        "sliding_window": model.attention.window or None,
        "intermediate_size": model.dense_ffn,
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn,
        "norm_topk_prob": model.moe.normalize == "chosen",
        "router_aux_loss_coef": model.moe.aux_loss,
    }


def block(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Piece]:
    yield from norms(model, layer, theirs, ours)
    yield from grouped_attention(model, theirs, ours)
    if is_moe(model, layer):
        yield from router(model, theirs + "mlp.", ours + "moe.")
        yield from experts(model, theirs + "mlp.", ours + "moe.")
    else:
        yield from gated_mlp(model, model.dense_ffn, theirs + "mlp.", ours + "dense.")


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, write, lambda model: table_of(model, block))
