"""Qwen2-MoE: biased queries, keys and values, one gated shared expert beside the routed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    ModelFamily,
    attention_layer_types,
    read_common_options,
    read_gqa_heads,
    read_sliding_windows,
    read_sparse_layers,
    write_common_options,
    write_gqa_heads,
    write_sparse_layers,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable, PlaceholderTensor
from moefold.checkpoint.hf.table_parts import (
    build_name_table,
    expert_pieces,
    gated_mlp_pieces,
    grouped_attention_pieces,
    norm_pieces,
    router_pieces,
)
from moefold.config.run import ModelConfig


def read_qwen2_moe(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options, theta=10_000.0, eps=1e-6)
    values |= read_gqa_heads(options, values) | read_sparse_layers(options, values["layers"])
    layers, window = values["layers"], options.take_optional("sliding_window")
    sliding = options.take("use_sliding_window", default=False)
    most = options.take("max_window_layers", default=28)
    usual = ["full_attention" if i % 2 or i >= most else "sliding_attention" for i in range(layers)]
    values |= read_sliding_windows(
        options, layers, window if sliding else None, options.take_optional("layer_types") or usual
    )
    shared = options.take("shared_expert_intermediate_size")
    return values | {
        "attention.qkv_bias": options.take("qkv_bias", default=True),
        "dense_ffn": options.take("intermediate_size"),
        "moe.experts": options.take("num_experts", "num_local_experts"),
        "moe.top_k": options.take("num_experts_per_tok"),
        "moe.ffn": options.take("moe_intermediate_size"),
        "moe.shared_ffn": shared,
        "moe.shared_gate": shared > 0,
        "moe.router.normalize": "chosen" if options.take("norm_topk_prob", default=False) else "none",
        "moe.balance.aux_loss": options.take("router_aux_loss_coef", default=0.001),
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
    if not is_moe_layer(model, layer):
        yield from gated_mlp_pieces(model, model.dense_ffn, theirs + "mlp.", ours + "dense.")
        return
    yield from router_pieces(model, theirs + "mlp.", ours + "moe.")
    yield from expert_pieces(model, theirs + "mlp.", ours + "moe.")
    if not model.moe.shared_ffn:
        return
    yield from gated_mlp_pieces(model, model.moe.shared_ffn, theirs + "mlp.shared_expert.", ours + "moe.shared.")
    gate = {"o": 1, "d": model.hidden}
    yield MappedPiece(theirs + "mlp.shared_expert_gate.weight", ours + "moe.shared.gate.weight", "o d -> o d", gate)


def qwen2_moe_table(model: ModelConfig) -> NameTable:
    """Their model has a shared expert in any case; where ours has none, theirs has no width."""
    d, shared = model.hidden, "mlp.shared_expert."
    shapes = {"gate_proj.weight": (0, d), "up_proj.weight": (0, d), "down_proj.weight": (d, 0)}
    empty = {shared + name: shape for name, shape in shapes.items()} | {"mlp.shared_expert_gate.weight": (1, d)}
    layers = [layer for layer in range(model.layers) if is_moe_layer(model, layer) and not model.moe.shared_ffn]
    blanks = [
        PlaceholderTensor(f"model.layers.{layer}.{name}", shape) for layer in layers for name, shape in empty.items()
    ]
    return replace(build_name_table(model, qwen2_moe_block_pieces), placeholders=tuple(blanks))


QWEN2_MOE = ModelFamily("qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, qwen2_moe_table)
