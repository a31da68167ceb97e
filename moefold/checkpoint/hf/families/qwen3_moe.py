"""Qwen3-MoE: grouped queries with a norm on each head, experts in every layer or every so many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    ModelFamily,
    read_common_options,
    read_gqa_heads,
    read_sliding_windows,
    read_sparse_layers,
    write_common_options,
    write_gqa_heads,
    write_sparse_layers,
)
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.table_parts import (
    build_name_table,
    expert_pieces,
    gated_mlp_pieces,
    grouped_attention_pieces,
    norm_pieces,
    router_pieces,
)
from moefold.config.run import ModelConfig


def read_qwen3_moe(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options, theta=10_000.0, eps=1e-6)
    values |= read_gqa_heads(options, values) | read_sparse_layers(options, values["layers"])
    window = options.take_optional("sliding_window")
    sliding = options.take("use_sliding_window", default=False)
    values |= read_sliding_windows(options, values["layers"], window if sliding else None, None)
    options.ignore_keys(["max_window_layers"])  # Qwen3-MoE's own code does not look at it
    bias = options.take("attention_bias", default=False)
    return values | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "dense_ffn": options.take("intermediate_size", default=6144),
        "moe.experts": options.take("num_experts", "num_local_experts"),
        "moe.top_k": options.take("num_experts_per_tok"),
        "moe.ffn": options.take("moe_intermediate_size"),
        "moe.router.normalize": "chosen" if options.take("norm_topk_prob", default=False) else "none",
        "moe.balance.aux_loss": options.take("router_aux_loss_coef", default=0.001),
    }


def write_qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common_options(model),
        **write_gqa_heads(model),
        **write_sparse_layers(model),
        "attention_bias": model.attention.qkv_bias,
        "use_sliding_window": model.attention.window > 0,
        "sliding_window": model.attention.window or None,
        "intermediate_size": model.dense_ffn,
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn,
        "norm_topk_prob": model.moe.router.normalize == "chosen",
        "router_aux_loss_coef": model.moe.balance.aux_loss,
    }


def qwen3_moe_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    if is_moe_layer(model, layer):
        yield from router_pieces(model, theirs + "mlp.", ours + "moe.")
        yield from expert_pieces(model, theirs + "mlp.", ours + "moe.")
    else:
        yield from gated_mlp_pieces(model, model.dense_ffn, theirs + "mlp.", ours + "dense.")


QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read_qwen3_moe,
    write_qwen3_moe,
    lambda model: build_name_table(model, qwen3_moe_block_pieces),
)
