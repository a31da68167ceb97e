"""Qwen2-MoE: biases on queries, keys and values; one gated shared expert and routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    FULL,
    SLIDING,
    ModelFamily,
    attention_layer_types,
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
    empty_mlp_shapes,
    expert_pieces,
    gated_mlp_pieces,
    grouped_attention_pieces,
    norm_pieces,
    router_pieces,
    with_placeholders,
)
from moefold.config.run import ModelConfig


def read_qwen2_moe(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options)
    layers = values["layers"]
    values |= read_gqa_attention(options, values)
    values |= read_sparse_layers(options, layers)
    window = options.take_optional("sliding_window")
    most = options.take_size("max_window_layers")
    default_kinds = [FULL if layer % 2 or layer >= most else SLIDING for layer in range(layers)]
    if not options.take_flag("use_sliding_window"):
        window = 0
        default_kinds = [FULL] * layers
    elif window is None:
        options.add_problem("sliding_window = null is not supported with use_sliding_window; expected 1 or more")
    kinds = options.take_optional("layer_types")
    if kinds is None:
        kinds = default_kinds
    values |= read_sliding_windows(options, layers, window, kinds)
    normalised = options.take_flag("norm_topk_prob")
    shared = options.take_size("shared_expert_intermediate_size")
    return values | {
        "attention.qkv_bias": options.take_flag("qkv_bias"),
        "dense_ffn": options.take_value("intermediate_size"),
        "moe.experts": options.take_value("num_experts"),
        "moe.top_k": options.take_value("num_experts_per_tok"),
        "moe.ffn": options.take_value("moe_intermediate_size"),
        "moe.shared_ffn": shared,
        "moe.shared_gate": shared > 0,
        "moe.router.normalize": "chosen" if normalised else "none",
        "moe.balance.aux_loss": options.take_value("router_aux_loss_coef"),
    }


def write_qwen2_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_common_options(model),
        **write_gqa_heads(model),
        **write_sparse_layers(model),
        "qkv_bias": model.attention.qkv_bias,
        "use_sliding_window": model.attention.window > 0,
        "sliding_window": model.attention.window or None,
        "max_window_layers": model.layers,
        "layer_types": attention_layer_types(model),
        "intermediate_size": model.dense_ffn,
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn,
        "shared_expert_intermediate_size": model.moe.shared_ffn,
        "norm_topk_prob": model.moe.router.normalize == "chosen",
        "router_aux_loss_coef": model.moe.balance.aux_loss,
    }


def qwen2_moe_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    theirs += "mlp."
    if not is_moe_layer(model, layer):
        width = model.dense_ffn
        yield from gated_mlp_pieces(model, width, theirs, ours + "dense.")
        return
    ours += "moe."
    yield from router_pieces(model, theirs, ours)
    yield from expert_pieces(model, theirs, ours)
    if not model.moe.shared_ffn:
        return
    width = model.moe.shared_ffn
    yield from gated_mlp_pieces(model, width, theirs + "shared_expert.", ours + "shared.")
    sizes = {"o": 1, "d": model.hidden}
    yield MappedPiece(theirs + "shared_expert_gate.weight", ours + "shared.gate.weight", "o d -> o d", sizes)


def qwen2_moe_table(model: ModelConfig) -> NameTable:
    """The table. Their model always has a shared expert: where ours has none, theirs has width 0."""
    table = build_name_table(model, qwen2_moe_block_pieces)
    if model.moe.shared_ffn:
        return table
    shapes = empty_mlp_shapes(model, "mlp.shared_expert.")
    shapes["mlp.shared_expert_gate.weight"] = (1, model.hidden)
    return with_placeholders(table, model, shapes)


QWEN2_MOE = ModelFamily(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    read_qwen2_moe,
    write_qwen2_moe,
    qwen2_moe_table,
    gates=("mlp.gate", "mlp.shared_expert_gate"),
)
