"""GLM-4-MoE: grouped queries with rope on half of the dims; routing, shared experts and MTP as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions, show_value
from moefold.checkpoint.hf.families.deepseek_v3 import (
    deepseek_mlp_pieces,
    read_scored_groups,
    table_with_shared_experts,
)
from moefold.checkpoint.hf.family import (
    ModelFamily,
    read_common_options,
    read_gqa_heads,
    write_common_options,
    write_gqa_heads,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.rope_options import read_rope_parameters, take_rope_parameters
from moefold.checkpoint.hf.table_parts import grouped_attention_pieces, norm_pieces
from moefold.config.run import ModelConfig


def read_glm4_moe(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options)
    values |= read_gqa_heads(options, values)
    values |= read_partial_rope(options, values["attention.head_dim"])
    ffn = options.take_size("moe_intermediate_size")
    experts = options.take_size("n_routed_experts")
    shared_experts = options.take_size("n_shared_experts")
    normalised = options.take_flag("norm_topk_prob")
    qk_norm = options.take_flag("use_qk_norm")
    return values | {
        "mtp": options.take_value("num_nextn_predict_layers"),
        "dense_ffn": options.take_value("intermediate_size"),
        "attention.qk_norm": "head" if qk_norm else "none",
        "attention.qkv_bias": options.take_flag("attention_bias"),
        "moe.experts": experts,
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": ffn,
        "moe.shared_ffn": ffn * shared_experts,
        "moe.dense_layers": options.take_value("first_k_dense_replace"),
        "moe.router.score": "sigmoid",
        "moe.router.normalize": "chosen" if normalised else "none",
        "moe.router.scale": options.take_value("routed_scaling_factor"),
        **read_scored_groups(options, experts),
        "moe.balance.aux_loss": 0.0001,  # as in DeepSeek-V3; config.json has no key for it, nor for the next
        "moe.balance.bias_rate": 0.001,
    }


def read_partial_rope(options: ConfigOptions, head_dim: int) -> dict[str, Any]:
    """Rope on the first dims of a head. Null for their share, where nothing is inside rope_parameters: on all dims."""
    parameters = take_rope_parameters(options)
    share = parameters.pop("partial_rotary_factor", 1.0)
    is_share = isinstance(share, int | float) and 0 < share <= 1
    rope_dim = int(head_dim * share) if is_share else 0
    if rope_dim == 0 or rope_dim % 2:
        options.add_problem(
            f"partial_rotary_factor = {show_value(share)} is not supported with head_dim = {head_dim}; expected the "
            "share of an even number of dims"
        )
        return {}
    rope = read_rope_parameters(options, parameters)
    return {**rope, "attention.rope_dim": 0 if rope_dim == head_dim else rope_dim}


def write_glm4_moe(model: ModelConfig) -> dict[str, Any]:
    a = model.attention
    moe = model.moe
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
    return table_with_shared_experts(model, glm4_moe_block_pieces)


GLM4_MOE = ModelFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read_glm4_moe,
    write_glm4_moe,
    glm4_moe_table,
)
