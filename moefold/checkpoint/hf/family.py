"""What a family of models is to the bridge: how to read its config.json, write it, and its table of names. Torch-free.

`read` gives our keys below `model.`, `write` the options of config.json; reading what was written gives back the same
model, and that is how an export finds out whether a family has a place for everything a model has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.rope_options import read_rope_options, write_rope_options
from moefold.config.run import ModelConfig


@dataclass(frozen=True)
class ModelFamily:
    """`kind` is model_type in config.json. A `dense` family has no experts: it is there to be upcycled."""

    kind: str
    architecture: str
    read: Callable[[ConfigOptions], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    name_table: Callable[[ModelConfig], NameTable]
    dense: bool = False


def read_common_options(
    options: ConfigOptions, theta: float, eps: float, latent: bool = False, partial: bool = False
) -> dict[str, Any]:
    """What every family has: sizes of the stream, the head, norms, positions, and what must be as it always is."""
    options.require_value("hidden_act", "silu", why="experts and MLPs are gated by SiLU")
    options.require_value("attention_dropout", 0.0, 0, why="there is no dropout")
    return {
        "layers": options.count("num_hidden_layers", most=10_000),
        "hidden": options.take("hidden_size"),
        "vocab": options.take("vocab_size"),
        "norm_eps": options.take("rms_norm_eps", default=eps),
        "tied_head": options.take("tie_word_embeddings", default=False),
        "init_std": options.take("initializer_range", default=0.02),
        "attention.heads": options.count("num_attention_heads", most=4096),
        **read_rope_options(options, theta, latent, partial),
    }


def write_common_options(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": model.init_std,
        "num_attention_heads": model.attention.heads,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **write_rope_options(model.attention.rope),
    }


def read_gqa_heads(options: ConfigOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Grouped heads; without a width of their own they share the stream's."""
    heads = values["attention.heads"]
    return {
        "attention.kv_heads": options.take("num_key_value_heads", default=heads),
        "attention.head_dim": options.take("head_dim", default=values["hidden"] // heads),
    }


def write_gqa_heads(model: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": model.attention.kv_heads, "head_dim": model.attention.head_dim}


def read_sliding_windows(
    options: ConfigOptions, layers: int, window: int | None, kinds: list[str] | None
) -> dict[str, Any]:
    """How far layers see: `kinds` are "sliding_attention" or "full_attention" for each; None: all are sliding."""
    if not window or kinds == ["full_attention"] * layers:
        return {}
    if kinds is None or kinds == ["sliding_attention"] * layers:
        return {"attention.window": window}
    for every in range(2, layers + 1):
        if kinds == ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]:
            return {"attention.window": window, "attention.full_every": every}
    options.add_problem(f"layer_types = {kinds} is not supported; expected every n-th layer to have full attention")
    return {}


def attention_layer_types(model: ModelConfig) -> list[str]:
    a = model.attention
    full = [not a.window or (a.full_every > 1 and (i + 1) % a.full_every == 0) for i in range(model.layers)]
    return ["full_attention" if each else "sliding_attention" for each in full]


def read_sparse_layers(options: ConfigOptions, layers: int) -> dict[str, Any]:
    """Which layers have experts, as Qwen says it: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = options.take("decoder_sparse_step", default=1)
    only = options.take("mlp_only_layers", default=[])
    dense = [i for i in range(layers) if i in only or (i + 1) % step]
    for first in range(layers + 1):
        if dense == [i for i in range(layers) if i < first or (i + 1) % step]:
            return {"moe.dense_layers": first, "moe.every": step}
    options.add_problem(f"mlp_only_layers = {only} is not supported; expected the first few layers")
    return {}


def write_sparse_layers(model: ModelConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": model.moe.every, "mlp_only_layers": list(range(model.moe.dense_layers))}
