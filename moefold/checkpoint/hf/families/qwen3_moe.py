"""Qwen3-MoE: grouped queries with RMSNorm on each head, experts in every layer or every n-th."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    ModelFamily,
    read_common_options,
    read_gqa_attention,
    read_sliding_windows,
    read_sparse_layers,
    write_common_options,
    write_gqa_heads,
    write_sparse_layers,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
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
    values = read_common_options(options)
    layers = values["layers"]
    values |= read_gqa_attention(options, values)
    values |= read_sparse_layers(options, layers)
    window = options.take_optional("sliding_window")
    if not options.take_flag("use_sliding_window"):
        window = None
    values |= read_sliding_windows(options, layers, window, None)
    options.ignore_keys(["max_window_layers"])  # Qwen3-MoE's own code does not read it
    bias = options.take_flag("attention_bias")
    normalised = options.take_flag("norm_topk_prob")
    return values | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "dense_ffn": options.take_value("intermediate_size"),
        "moe.experts": options.take_value("num_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": options.take_value("moe_intermediate_size"),
        "moe.router.normalize": "chosen" if normalised else "none",
        "moe.balance.aux_loss": options.take_value("router_aux_loss_coef"),
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
    theirs += "mlp."
    if is_moe_layer(model, layer):
        yield from router_pieces(model, theirs, ours + "moe.")
        yield from expert_pieces(model, theirs, ours + "moe.")
    else:
        width = model.dense_ffn
        yield from gated_mlp_pieces(model, width, theirs, ours + "dense.")


def qwen3_moe_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, qwen3_moe_block_pieces)


QWEN3_MOE = ModelFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read_qwen3_moe,
    write_qwen3_moe,
    qwen3_moe_table,
    gates=("mlp.gate",),
)
