"""GLM-4-MoE: grouped queries of which half the dims turn, DeepSeek-V3's routing, shared experts and further tokens."""

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
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.table_parts import build_name_table, grouped_attention_pieces, norm_pieces
from moefold.config.run import ModelConfig


def read_glm4_moe(options: ConfigOptions) -> dict[str, Any]:
    inner = options.left.get("rope_parameters")
    share = inner.get("partial_rotary_factor") if isinstance(inner, Mapping) else None
    share = options.take("partial_rotary_factor", default=share or 0.5)
    values = read_common_options(options, theta=10_000.0, eps=1e-5, partial=True)
    values |= read_gqa_heads(options, values)
    turning = int(values["attention.head_dim"] * share)
    ffn = options.take("moe_intermediate_size")
    return values | {
        "mtp": options.take("num_nextn_predict_layers", "num_mtp_layers", default=0),
        "dense_ffn": options.take("intermediate_size"),
        "attention.rope_dim": 0 if turning == values["attention.head_dim"] else turning,
        "attention.qk_norm": "head" if options.take("use_qk_norm", default=False) else "none",
        "attention.qkv_bias": options.take("attention_bias", default=False),
        "moe.experts": options.take("n_routed_experts", "num_local_experts"),
        "moe.top_k": options.take("num_experts_per_tok"),
        "moe.ffn": ffn,
        "moe.shared_ffn": ffn * (options.take_optional("n_shared_experts") or 0),
        "moe.dense_layers": options.take("first_k_dense_replace", default=0),
        "moe.router.score": "sigmoid",
        "moe.router.normalize": "chosen" if options.take("norm_topk_prob", default=True) else "none",
        "moe.router.scale": options.take("routed_scaling_factor", default=1.0),
        "moe.router.groups": options.take("n_group", default=1),
        "moe.router.groups_chosen": options.take("topk_group", default=1),
        "moe.balance.aux_loss": 0.0001,  # config.json tells neither; as in DeepSeek-V3
        "moe.balance.bias_rate": 0.001,
    }


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


GLM4_MOE = ModelFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read_glm4_moe,
    write_glm4_moe,
    lambda model: build_name_table(model, glm4_moe_block_pieces),
)
