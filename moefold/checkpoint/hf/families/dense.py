"""Dense families, from which models are upcycled: Llama, Mistral, Qwen2, Qwen3. Every layer has a dense MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import (
    FULL,
    SLIDING,
    ModelFamily,
    read_common_options,
    read_gqa_attention,
    read_sliding_windows,
)
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.table_parts import build_name_table, gated_mlp_pieces, grouped_attention_pieces, norm_pieces
from moefold.config.run import ModelConfig


def read_dense_options(options: ConfigOptions) -> dict[str, Any]:
    values = read_common_options(options)
    values |= read_gqa_attention(options, values)
    values["dense_ffn"] = options.take_value("intermediate_size")
    values["moe.dense_layers"] = values["layers"]
    return values


def read_llama(options: ConfigOptions) -> dict[str, Any]:
    options.require_value("mlp_bias", False, why="MLPs have no biases")
    bias = options.take_flag("attention_bias")
    values = read_dense_options(options)
    return values | {"attention.qkv_bias": bias, "attention.out_bias": bias}


def read_mistral(options: ConfigOptions) -> dict[str, Any]:
    values = read_dense_options(options)
    window = options.take_optional("sliding_window")
    return values | read_sliding_windows(options, values["layers"], window, None)


def read_qwen2(options: ConfigOptions) -> dict[str, Any]:
    values = read_dense_options(options)
    layers = values["layers"]
    window = options.take_optional("sliding_window")
    if not options.take_flag("use_sliding_window"):
        window = None
    full_layers = options.take_size("max_window_layers")
    kinds = options.take_optional("layer_types")
    if kinds is None and window is not None:
        full = [FULL] * min(full_layers, layers)
        sliding = [SLIDING] * (layers - len(full))
        kinds = full + sliding
    values |= read_sliding_windows(options, layers, window, kinds)
    return values | {"attention.qkv_bias": True}


def read_qwen3(options: ConfigOptions) -> dict[str, Any]:
    bias = options.take_flag("attention_bias")
    return read_qwen2(options) | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
    }


def dense_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    width = model.dense_ffn
    yield from gated_mlp_pieces(model, width, theirs + "mlp.", ours + "dense.")


def refuse_to_write(_: ModelConfig) -> dict[str, Any]:
    """Dense families are read only: `writable_families` leaves them out."""
    raise NotImplementedError


def dense_table(model: ModelConfig) -> NameTable:
    return build_name_table(model, dense_block_pieces)


def dense_family(kind: str, architecture: str, read: Any) -> ModelFamily:
    return ModelFamily(kind, architecture, read, refuse_to_write, dense_table, dense=True)


LLAMA = dense_family("llama", "LlamaForCausalLM", read_llama)
MISTRAL = dense_family("mistral", "MistralForCausalLM", read_mistral)
QWEN2 = dense_family("qwen2", "Qwen2ForCausalLM", read_qwen2)
QWEN3 = dense_family("qwen3", "Qwen3ForCausalLM", read_qwen3)
