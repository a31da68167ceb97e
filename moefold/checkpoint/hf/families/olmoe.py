"""OLMoE: RMSNorm on queries and keys over all heads together; routing weights are not normalised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import ModelFamily, read_common_options, read_gqa_attention, write_common_options
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.table_parts import (
    build_name_table,
    expert_pieces,
    grouped_attention_pieces,
    norm_pieces,
    router_pieces,
)
from moefold.config.run import ModelConfig


def read_olmoe(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options)
    values |= read_gqa_attention(options, values)
    head_dim = values["attention.head_dim"]
    if head_dim * values["attention.heads"] != values["hidden"]:
        options.add_problem(f"head_dim = {head_dim} is not supported: norms on queries have the hidden size")
    bias = options.take_flag("attention_bias")
    if options.take_optional("clip_qkv") is not None:
        options.add_problem("clip_qkv is not supported; expected none: queries, keys and values are not cut off")
    normalised = options.take_flag("norm_topk_prob")
    return values | {
        "attention.qk_norm": "full",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "moe.experts": options.take_value("num_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": options.take_value("intermediate_size"),
        "moe.router.normalize": "chosen" if normalised else "none",
        "moe.balance.aux_loss": options.take_value("router_aux_loss_coef"),
    }


def write_olmoe(model: ModelConfig) -> dict[str, Any]:
    """The options; there is none for head_dim, which is the hidden size divided by the heads."""
    return {
        **write_common_options(model),
        "num_key_value_heads": model.attention.kv_heads,
        "attention_bias": model.attention.qkv_bias,
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn,
        "norm_topk_prob": model.moe.router.normalize == "chosen",
        "router_aux_loss_coef": model.moe.balance.aux_loss,
    }


def olmoe_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    yield from router_pieces(model, theirs + "mlp.", ours + "moe.")
    yield from expert_pieces(model, theirs + "mlp.", ours + "moe.")


def olmoe_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, olmoe_block_pieces)


OLMOE = ModelFamily(
    "olmoe",
    "OlmoeForCausalLM",
    read_olmoe,
    write_olmoe,
    olmoe_table,
    gates=("mlp.gate",),
)
