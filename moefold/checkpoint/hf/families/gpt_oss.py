"""GPT-OSS: attention sinks, alternating windows, biases everywhere, and experts stacked in one transposed tensor with
gate and up in alternating columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    ModelFamily,
    attention_layer_types,
    layer_types,
    read_common_options,
    read_gqa_attention,
    read_sliding_windows,
    write_common_options,
    write_gqa_heads,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.published_defaults import GPT_OSS_DEFAULTS
from moefold.checkpoint.hf.table_parts import build_name_table, grouped_attention_pieces, norm_pieces, router_pieces
from moefold.config.run import ModelConfig


def read_gpt_oss(options: ConfigOptions) -> dict[str, Any]:
    options.require_value("hidden_act", "silu", why="experts of GPT-OSS do not read it")
    values = read_common_options(options)
    values |= read_gqa_attention(options, values)
    options.require_value("swiglu_alpha", 1.702, why="as in GPT-OSS")
    layers = values["layers"]
    kinds = options.take_optional("layer_types")
    if kinds is None:
        kinds = layer_types(layers, full_every=2)
    window = options.take_optional("sliding_window")
    values |= read_sliding_windows(options, layers, window, kinds)
    bias = options.take_flag("attention_bias")
    top_k = options.take_value("num_experts_per_tok")
    options.require_value("experts_per_token", top_k, why="it repeats num_experts_per_tok")
    return values | {
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "attention.sinks": True,
        "moe.experts": options.take_value("num_local_experts"),
        "moe.top_k": top_k,
        "moe.ffn": options.take_value("intermediate_size"),
        "moe.router.score": "softmax_chosen",
        "moe.biases": True,
        "moe.activation": "clamped_swiglu",
        "moe.clamp": options.take_value("swiglu_limit"),
        "moe.balance.aux_loss": options.take_value("router_aux_loss_coef"),
    }


def write_gpt_oss(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common_options(model),
        **write_gqa_heads(model),
        "attention_bias": model.attention.qkv_bias,
        "sliding_window": model.attention.window or GPT_OSS_DEFAULTS["sliding_window"],  # a number even if unused
        "layer_types": attention_layer_types(model),
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn,
        "swiglu_alpha": 1.702,
        "swiglu_limit": model.moe.clamp,
        "router_aux_loss_coef": model.moe.balance.aux_loss,
    }


def gpt_oss_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    heads = {"h": model.attention.heads}
    yield MappedPiece(theirs + "self_attn.sinks", ours + "attention.sinks", "h -> h", heads)
    yield from router_pieces(model, theirs + "mlp.", ours + "moe.", name="router")
    moe = model.moe
    sizes = {"e": moe.experts, "f": moe.ffn, "d": model.hidden, "g": 2}  # g: gate and up
    theirs = theirs + "mlp.experts."
    ours = ours + "moe.experts."
    yield MappedPiece(theirs + "gate_up_proj", ours + "gate_up", "e d (f g) -> e g f d", sizes)
    yield MappedPiece(theirs + "gate_up_proj_bias", ours + "gate_up_bias", "e (f g) -> e g f", sizes)
    yield MappedPiece(theirs + "down_proj", ours + "down", "e f d -> e d f", sizes)
    yield MappedPiece(theirs + "down_proj_bias", ours + "down_bias", "e d -> e d", sizes)


def gpt_oss_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, gpt_oss_block_pieces)


GPT_OSS = ModelFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    read_gpt_oss,
    write_gpt_oss,
    gpt_oss_table,
)
