"""A family of Hugging Face models: how its config.json is read and written, and its name table. Torch-free.

`read` returns our keys below `model.`, `write` the options of config.json. Reading what was written must give the same
model: that is how an export finds out whether a family has an option for everything in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions, show_value
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.rope_options import read_rope_options, write_rope_options
from moefold.config.run import ModelConfig

FULL = "full_attention"  # values of layer_types
SLIDING = "sliding_attention"
GATED_BY = {  # hidden_act, which acts on the gate of experts and MLPs; of two names, the first is written
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}


@dataclass(frozen=True)
class ModelFamily:
    """`kind` is model_type in config.json. A `dense` family has no experts: it is read only, for upcycling. `gates` are
    modules of a layer that are plain linear layers in their code: FP8 leaves them out by name."""

    kind: str
    architecture: str
    read: Callable[[ConfigOptions], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    name_table: Callable[[ModelConfig], NameTable]
    dense: bool = False
    gates: tuple[str, ...] = ()


def read_common_options(options: ConfigOptions) -> dict[str, Any]:
    """The options of every family: sizes and norms, and those that must have one value."""
    options.require_value("attention_dropout", 0.0, 0, why="there is no dropout")
    return {
        **read_activation(options),
        "layers": options.take_count("num_hidden_layers", most=10_000),
        "hidden": options.take_size("hidden_size"),
        "vocab": options.take_value("vocab_size"),
        "norm_eps": options.take_value("rms_norm_eps"),
        "tied_head": options.take_flag("tie_word_embeddings"),
        "init_std": options.take_value("initializer_range"),
        "attention.heads": options.take_count("num_attention_heads", most=4096),
    }


def read_activation(options: ConfigOptions) -> dict[str, Any]:
    """The activation of experts, shared experts and dense MLPs, which is one in every family."""
    function = options.take_value("hidden_act")
    if function not in GATED_BY:
        shown = show_value(function)
        options.add_problem(f"hidden_act = {shown} is not supported; expected one of {', '.join(GATED_BY)}")
        return {}
    activation = GATED_BY[function]
    return {"moe.activation": activation, "dense_activation": activation}


def write_activation(model: ModelConfig) -> str:
    """hidden_act; "silu" for an activation that no family has, which is found by reading it back."""
    for function, activation in GATED_BY.items():
        if activation == model.moe.activation:
            return function
    return "silu"


def write_common_options(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": model.init_std,
        "num_attention_heads": model.attention.heads,
        "hidden_act": write_activation(model),
        "attention_dropout": 0.0,
        **write_rope_options(model.attention.rope),
    }


def read_gqa_attention(options: ConfigOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Grouped-query heads, and rope on all of their dims."""
    heads = read_gqa_heads(options, values)
    return heads | read_rope_options(options)


def read_gqa_heads(options: ConfigOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Grouped-query heads. Without a head_dim, the heads divide the hidden size."""
    heads = values["attention.heads"]
    kv_heads = options.take_optional("num_key_value_heads")
    head_dim = options.take_optional("head_dim")
    if head_dim is None:
        head_dim = values["hidden"] // heads
    return {
        "attention.kv_heads": heads if kv_heads is None else kv_heads,
        "attention.head_dim": head_dim,
    }


def write_gqa_heads(model: ModelConfig) -> dict[str, Any]:
    a = model.attention
    return {"num_key_value_heads": a.kv_heads, "head_dim": a.head_dim}


def read_sliding_windows(
    options: ConfigOptions, layers: int, window: int | None, kinds: list[str] | None
) -> dict[str, Any]:
    """Sliding windows. `kinds` has "sliding_attention" or "full_attention" for each layer; None: all slide, if there is
    a window."""
    if kinds is None:
        kinds = [FULL if window is None else SLIDING] * layers
    if kinds == [FULL] * layers:
        return {}
    if not isinstance(window, int) or window < 1:
        needed = "layers have windows by use_sliding_window or layer_types"
        options.add_problem(f"sliding_window = {show_value(window)} is not supported: {needed}; expected 1 or more")
        return {}
    if kinds == [SLIDING] * layers:
        return {"attention.window": window}
    for every in range(2, layers + 1):
        if kinds == layer_types(layers, every):
            return {"attention.window": window, "attention.full_every": every}
    options.add_problem(
        f"layer_types = {kinds} is not supported; expected every n-th layer to have full attention "
        "(max_window_layers and num_hidden_layers count too)"
    )
    return {}


def layer_types(layers: int, full_every: int) -> list[str]:
    """The attention of each layer when every n-th has full attention."""
    numbers = range(1, layers + 1)
    return [SLIDING if number % full_every else FULL for number in numbers]


def attention_layer_types(model: ModelConfig) -> list[str]:
    attention = model.attention
    if not attention.window:
        return [FULL] * model.layers
    if attention.full_every <= 1:
        return [SLIDING] * model.layers
    return layer_types(model.layers, attention.full_every)


def read_sparse_layers(options: ConfigOptions, layers: int) -> dict[str, Any]:
    """Qwen's choice of MoE layers: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = options.take_count("decoder_sparse_step", most=10_000)
    only = options.take_optional("mlp_only_layers") or []
    every_layer = range(layers)
    between = {layer for layer in every_layer if (layer + 1) % step}
    dense = between.union(layer for layer in every_layer if layer in only)
    for first in range(layers + 1):
        if dense == between.union(range(first)):
            return {"moe.dense_layers": first, "moe.every": step}
    options.add_problem(f"mlp_only_layers = {only} is not supported; expected the first few layers")
    return {}


def write_sparse_layers(model: ModelConfig) -> dict[str, Any]:
    dense_layers = range(model.moe.dense_layers)
    return {"decoder_sparse_step": model.moe.every, "mlp_only_layers": list(dense_layers)}
