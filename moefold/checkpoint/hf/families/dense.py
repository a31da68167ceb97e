"""The dense families that models are upcycled from: Llama, Mistral, Qwen2, Qwen3. Every layer has a dense MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.family import Family, read_heads, read_stream, read_windows
from moefold.checkpoint.hf.names import gated_mlp, grouped_attention, norms, table_of
from moefold.checkpoint.hf.options import Options
from moefold.checkpoint.hf.piece import Piece
from moefold.config.run import ModelConfig


def read_dense(options: Options, eps: float) -> dict[str, Any]:
    values = read_stream(options, theta=10_000.0, eps=eps)
    ffn = options.take("intermediate_size")
    return values | read_heads(options, values) | {"dense_ffn": ffn, "moe.dense_layers": values["layers"]}


def read_llama(options: Options) -> dict[str, Any]:
    options.demand("mlp_bias", False, why="MLPs have no biases")
    bias = options.take("attention_bias", default=False)
    return read_dense(options, 1e-6) | {"attention.qkv_bias": bias, "attention.out_bias": bias}


def read_mistral(options: Options) -> dict[str, Any]:
    values = read_dense(options, 1e-6)
    return values | read_windows(options, values["layers"], options.optional("sliding_window"), None)


def read_qwen2(options: Options) -> dict[str, Any]:
    values = read_dense(options, 1e-6)
    layers, window = values["layers"], options.optional("sliding_window")
    sliding = options.take("use_sliding_window", default=False)
    most = options.take("max_window_layers", default=28)
    usual = ["sliding_attention" if i >= most else "full_attention" for i in range(layers)]
    kinds = options.optional("layer_types") or usual
    return values | read_windows(options, layers, window if sliding else None, kinds) | {"attention.qkv_bias": True}


def read_qwen3(options: Options) -> dict[str, Any]:
    bias = options.take("attention_bias", default=False)
    return read_qwen2(options) | {
        "attention.qk_norm": "head",
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
    }


def block(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Piece]:
    yield from norms(model, layer, theirs, ours)
    yield from grouped_attention(model, theirs, ours)
    yield from gated_mlp(model, model.dense_ffn, theirs + "mlp.", ours + "dense.")


def not_written(_: ModelConfig) -> dict[str, Any]:
    """Dense models are read, to be upcycled; there is nobody who would write one."""
    raise NotImplementedError


def dense(kind: str, architecture: str, read: Any) -> Family:
    return Family(kind, architecture, read, not_written, lambda model: table_of(model, block), dense=True)


LLAMA = dense("llama", "LlamaForCausalLM", read_llama)
MISTRAL = dense("mistral", "MistralForCausalLM", read_mistral)
QWEN2 = dense("qwen2", "Qwen2ForCausalLM", read_qwen2)
QWEN3 = dense("qwen3", "Qwen3ForCausalLM", read_qwen3)
