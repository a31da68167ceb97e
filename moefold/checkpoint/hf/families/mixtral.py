"""Mixtral: grouped queries, experts in every layer, routing weights normalised over the chosen experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    ModelFamily,
    read_common_options,
    read_gqa_attention,
    read_sliding_windows,
    write_common_options,
    write_gqa_heads,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.table_parts import (
    build_name_table,
    expert_pieces,
    grouped_attention_pieces,
    norm_pieces,
    router_pieces,
)
from moefold.config.run import ModelConfig


def read_mixtral(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options)
    values |= read_gqa_attention(options, values)
    window = options.take_optional("sliding_window")
    values |= read_sliding_windows(options, values["layers"], window, None)
    reason = "its noise reaches the experts too; moe.router.jitter is the router's"
    options.require_value("router_jitter_noise", 0.0, 0, why=reason)
    return values | {
        "moe.experts": options.take_value("num_local_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": options.take_value("intermediate_size"),
        "moe.balance.aux_loss": options.take_value("router_aux_loss_coef"),
    }


def write_mixtral(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common_options(model),
        **write_gqa_heads(model),
        "sliding_window": model.attention.window or None,
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn,
        "router_aux_loss_coef": model.moe.balance.aux_loss,
    }


def mixtral_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    theirs = theirs + "block_sparse_moe."
    ours = ours + "moe."
    yield from router_pieces(model, theirs, ours)
    names = ("w1", "w3", "w2")
    yield from expert_pieces(model, theirs, ours, names)


def mixtral_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, mixtral_block_pieces)


MIXTRAL = ModelFamily(
    "mixtral",
    "MixtralForCausalLM",
    read_mixtral,
    write_mixtral,
    mixtral_table,
    gates=("block_sparse_moe.gate",),
)
