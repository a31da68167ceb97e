"""DeepSeek-V3: MLA, sigmoid routing with a selection bias within groups, shared experts, MTP layers. Kimi-K2 is the
same under another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import ModelFamily, read_common_options, write_common_options
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.rope_options import read_rope_options
from moefold.checkpoint.hf.table_parts import (
    BlockPieces,
    build_name_table,
    empty_mlp_shapes,
    expert_pieces,
    gated_mlp_pieces,
    latent_attention_pieces,
    norm_pieces,
    router_pieces,
    with_placeholders,
)
from moefold.config.run import ModelConfig

LATENT_EPS = 1e-6  # of the norms on latents, fixed in their code, whatever rms_norm_eps is


def read_latent_options(options: ConfigOptions) -> dict[str, Any]:
    """The options that DeepSeek-V2 and V3 share: MLA, dense first layers, shared experts."""
    values = read_common_options(options)
    if values["norm_eps"] != LATENT_EPS:
        options.add_problem(f"rms_norm_eps = {values['norm_eps']} is not supported: norms on latents have {LATENT_EPS}")
    rope_dim = options.take_size("qk_rope_head_dim")
    nope_dim = options.take_size("qk_nope_head_dim")
    heads = values["attention.heads"]
    values |= read_rope_options(options, latent=True)
    bias = options.take_flag("attention_bias")
    options.require_value("num_key_value_heads", heads, why="each of num_attention_heads has keys of its own")
    options.require_value("moe_layer_freq", 1, why="all layers behind the dense ones have experts")
    options.ignore_keys(["qk_head_dim"])  # follows from the others
    ffn = options.take_size("moe_intermediate_size")
    shared_experts = options.take_size("n_shared_experts")
    per_sequence = options.take_flag("seq_aux")
    return values | {
        "dense_ffn": options.take_value("intermediate_size"),
        "attention.kind": "mla",
        "attention.kv_heads": heads,
        "attention.head_dim": nope_dim + rope_dim,
        "attention.rope_dim": rope_dim,
        "attention.value_dim": options.take_value("v_head_dim"),
        "attention.q_rank": options.take_optional("q_lora_rank") or 0,
        "attention.kv_rank": options.take_value("kv_lora_rank"),
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "moe.experts": options.take_size("n_routed_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": ffn,
        "moe.shared_ffn": ffn * shared_experts,
        "moe.dense_layers": options.take_value("first_k_dense_replace"),
        "moe.router.scale": options.take_value("routed_scaling_factor"),
        "moe.balance.aux_loss": options.take_value("aux_loss_alpha"),
        "moe.balance.aux_over": "sequence" if per_sequence else "microbatch",
    }


def read_deepseek_v3(options: ConfigOptions) -> dict[str, Any]:
    values = read_latent_options(options)
    refuse_other_rope(options, values)
    options.require_value("scoring_func", "sigmoid", why="as in DeepSeek-V3")
    options.require_value("topk_method", "noaux_tc", why="as in DeepSeek-V3")
    normalised = options.take_flag("norm_topk_prob")
    return values | {
        "mtp": options.take_value("num_nextn_predict_layers"),
        "moe.router.score": "sigmoid",
        "moe.router.normalize": "chosen" if normalised else "none",
        **read_scored_groups(options, values["moe.experts"]),
        "moe.balance.bias_rate": 0.001,  # of their training; config.json has no key for it
    }


def read_scored_groups(options: ConfigOptions, experts: int) -> dict[str, Any]:
    """Groups of experts, each with the score of its two best."""
    groups = options.take_count("n_group", most=100_000)
    if experts < 2 * groups:
        options.add_problem(f"n_group = {groups} is not supported with {experts} experts; expected two or more a group")
    return {"moe.router.groups": groups, "moe.router.groups_chosen": options.take_value("topk_group")}


def refuse_other_rope(options: ConfigOptions, values: dict[str, Any]) -> None:
    """Refuse rope dims in halves, and frequencies of another width: transformers makes them by head_dim."""
    if not options.take_flag("rope_interleave"):
        options.add_problem("rope_interleave = false is not supported (rope dims are in adjacent pairs); expected true")
    rope_dim = values["attention.rope_dim"]
    options.require_value("head_dim", rope_dim, why="it is qk_rope_head_dim")


def write_latent_options(model: ModelConfig) -> dict[str, Any]:
    a = model.attention
    moe = model.moe
    return {
        **write_common_options(model),
        "num_key_value_heads": a.heads,
        "q_lora_rank": a.q_rank or None,
        "kv_lora_rank": a.kv_rank,
        "qk_nope_head_dim": a.head_dim - a.rope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.value_dim or a.head_dim,
        "attention_bias": a.qkv_bias,
        "intermediate_size": model.dense_ffn,
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": moe.dense_layers,
        "moe_layer_freq": moe.every,
        "routed_scaling_factor": moe.router.scale,
        "aux_loss_alpha": moe.balance.aux_loss,
        "seq_aux": moe.balance.aux_over == "sequence",
    }


def write_deepseek_v3(model: ModelConfig) -> dict[str, Any]:
    router = model.moe.router
    return {
        **write_latent_options(model),
        "num_nextn_predict_layers": model.mtp,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": router.normalize == "chosen",
        "n_group": router.groups,
        "topk_group": router.groups_chosen,
    }


def latent_block_pieces(
    model: ModelConfig, layer: int, theirs: str, ours: str, correction: bool
) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from latent_attention_pieces(model, theirs, ours)
    yield from deepseek_mlp_pieces(model, layer, theirs, ours, correction)


def deepseek_mlp_pieces(
    model: ModelConfig, layer: int, theirs: str, ours: str, correction: bool
) -> Iterator[MappedPiece]:
    """A dense MLP in the first layers, then routed and shared experts."""
    theirs += "mlp."
    if not is_moe_layer(model, layer):
        width = model.dense_ffn
        yield from gated_mlp_pieces(model, width, theirs, ours + "dense.")
        return
    ours += "moe."
    yield from router_pieces(model, theirs, ours, correction=correction)
    yield from expert_pieces(model, theirs, ours)
    if model.moe.shared_ffn:
        width = model.moe.shared_ffn
        yield from gated_mlp_pieces(model, width, theirs + "shared_experts.", ours + "shared.")


def deepseek_v3_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    return latent_block_pieces(model, layer, theirs, ours, correction=True)


def deepseek_v3_table(model: ModelConfig) -> NameTable:
    return table_with_shared_experts(model, deepseek_v3_block_pieces)


def table_with_shared_experts(model: ModelConfig, block_pieces: BlockPieces) -> NameTable:
    """The table. Their models always have shared experts: where ours has none, theirs have width 0."""
    table = build_name_table(model, block_pieces)
    if model.moe.shared_ffn:
        return table
    return with_placeholders(table, model, empty_mlp_shapes(model, "mlp.shared_experts."))


DEEPSEEK_V3 = ModelFamily(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read_deepseek_v3,
    write_deepseek_v3,
    deepseek_v3_table,
)
