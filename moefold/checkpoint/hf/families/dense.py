"""The dense families that models are upcycled from: Llama, Mistral, Qwen2, Qwen3. Every layer has a dense MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.family import ModelFamily, read_common_options, read_gqa_heads, read_sliding_windows
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.table_parts import build_name_table, gated_mlp_pieces, grouped_attention_pieces, norm_pieces
from moefold.config.run import ModelConfig


def read_dense_options(options: ConfigOptions, eps: float) -> dict[str, Any]:
    values = read_common_options(options, theta=10_000.0, eps=eps)
    ffn = options.take("intermediate_size")
    return values | read_gqa_heads(options, values) | {"dense_ffn": ffn, "moe.dense_layers": values["layers"]}


def read_llama(options: ConfigOptions) -> dict[str, Any]:
    options.require_value("mlp_bias", False, why="MLPs have no biases")
    bias = options.take("attention_bias", default=False)
    return read_dense_options(options, 1e-6) | {"attention.qkv_bias": bias, "attention.out_bias": bias}


def read_mistral(options: ConfigOptions) -> dict[str, Any]:
    values = read_dense_options(options, 1e-6)
    return values | read_sliding_windows(options, values["layers"], options.take_optional("sliding_window"), None)


def read_qwen2(options: ConfigOptions) -> dict[str, Any]:
    values = read_dense_options(options, 1e-6)
    layers, window = values["layers"], options.take_optional("sliding_window")
    sliding = options.take("use_sliding_window", default=False)
    most = options.take("max_window_layers", default=28)
    usual = ["sliding_attention" if i >= most else "full_attention" for i in range(layers)]
    kinds = options.take_optional("layer_types") or usual
    return (
        values
        | read_sliding_windows(options, layers, window if sliding else None, kinds)
        | {"attention.qkv_bias": True}
    )


def read_qwen3(options: ConfigOptions) -> dict[str, Any]:
    bias = options.take("attention_bias", default=False)
    return read_qwen2(options) | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
    }


def dense_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    yield from norm_pieces(model, layer, theirs, ours)
    yield from grouped_attention_pieces(model, theirs, ours)
    yield from gated_mlp_pieces(model, model.dense_ffn, theirs + "mlp.", ours + "dense.")


def refuse_to_write(_: ModelConfig) -> dict[str, Any]:
    """Dense models are read, to be upcycled; there is nobody who would write one."""
    raise NotImplementedError


def dense_family(kind: str, architecture: str, read: Any) -> ModelFamily:
    return ModelFamily(
        kind, architecture, read, refuse_to_write, lambda model: build_name_table(model, dense_block_pieces), dense=True
    )


LLAMA = dense_family("llama", "LlamaForCausalLM", read_llama)
MISTRAL = dense_family("mistral", "MistralForCausalLM", read_mistral)
QWEN2 = dense_family("qwen2", "Qwen2ForCausalLM", read_qwen2)
QWEN3 = dense_family("qwen3", "Qwen3ForCausalLM", read_qwen3)
