"""GLM-4-MoE: grouped queries with rope on half of the dims; routing, shared experts and MTP as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.families.deepseek_v3 import deepseek_mlp_pieces
from moefold.checkpoint.hf.family import (
    ModelFamily,
    read_common_options,
    read_gqa_heads,
    write_common_options,
    write_gqa_heads,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.table_parts import build_name_table, grouped_attention_pieces, norm_pieces
from moefold.config.run import ModelConfig


def read_glm4_moe(options: ConfigOptions) -> dict[str, Any]:
    rope_share = read_rope_share(options)
    values = read_common_options(options, theta=10_000.0, eps=1e-5, partial=True)
    values |= read_gqa_heads(options, values)
    head_dim = values["attention.head_dim"]
    rope_dim = int(head_dim * rope_share)
    ffn = options.take_value("moe_intermediate_size")
    shared_experts = options.take_optional("n_shared_experts") or 0
    normalised = options.take_value("norm_topk_prob", default=True)
    qk_norm = options.take_value("use_qk_norm", default=False)
    return values | {
        "mtp": options.take_value("num_nextn_predict_layers", "num_mtp_layers", default=0),
        "dense_ffn": options.take_value("intermediate_size"),
        "attention.rope_dim": 0 if rope_dim == head_dim else rope_dim,
        "attention.qk_norm": "head" if qk_norm else "none",
        "attention.qkv_bias": options.take_value("attention_bias", default=False),
        "moe.experts": options.take_value("n_routed_experts", "num_local_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": ffn,
        "moe.shared_ffn": ffn * shared_experts,
        "moe.dense_layers": options.take_value("first_k_dense_replace", default=0),
        "moe.router.score": "sigmoid",
        "moe.router.normalize": "chosen" if normalised else "none",
        "moe.router.scale": options.take_value("routed_scaling_factor", default=1.0),
        "moe.router.groups": options.take_value("n_group", default=1),
        "moe.router.groups_chosen": options.take_value("topk_group", default=1),
        "moe.balance.aux_loss": 0.0001,  # as in DeepSeek-V3; config.json has no key for it, nor for the next
        "moe.balance.bias_rate": 0.001,
    }


def read_rope_share(options: ConfigOptions) -> float:
    """The share of a head's dims that have rope: an option, or a key of rope_parameters."""
    rope = options.left.get("rope_parameters")
    share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    return options.take_value("partial_rotary_factor", default=share or 0.5)


def write_glm4_moe(model: ModelConfig) -> dict[str, Any]:
    a, moe = model.attention, model.moe
    return {
        **write_common_options(model),
        **write_gqa_heads(model),
        "num_nextn_predict_layers": model.mtp,
        "partial_rotary_factor": (a.rope_dim or a.head_dim) / a.head_dim,
        "use_qk_norm": a.qk_norm == "head",
        "attention_bias": a.qkv_bias,
        "intermediate_size": model.dense_ffn,
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": moe.dense_layers,
        "norm_topk_prob": moe.router.normalize == "chosen",
        "routed_scaling_factor": moe.router.scale,
        "n_group": moe.router.groups,
        "topk_group": moe.router.groups_chosen,
    }


def glm4_moe_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    yield from deepseek_mlp_pieces(model, layer, theirs, ours, correction=True)


def glm4_moe_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, glm4_moe_block_pieces)


GLM4_MOE = ModelFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read_glm4_moe,
    write_glm4_moe,
    glm4_moe_table,
)
