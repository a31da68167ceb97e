"""Mixtral: plain grouped queries, experts in every layer, weights normalised over the chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.family import Family, read_heads, read_stream, read_windows, write_heads, write_stream
from moefold.checkpoint.hf.names import experts, grouped_attention, norms, router, table_of
from moefold.checkpoint.hf.options import Options
from moefold.checkpoint.hf.piece import Piece
from moefold.config.run import ModelConfig


def read(options: Options) -> dict[str, Any]:
    values = read_stream(options, theta=1e6, eps=1e-5)
    values |= read_heads(options, values)
    values |= read_windows(options, values["layers"], options.optional("sliding_window"), None)
    options.demand("router_jitter_noise", 0.0, 0, why="its noise reaches the experts too; moe.jitter is the router's")
    return values | {
        "moe.experts": options.take("num_local_experts", "num_experts"),
        "moe.top_k": options.take("num_experts_per_tok"),
        "moe.ffn": options.take("intermediate_size"),
        "moe.aux_loss": options.take("router_aux_loss_coef", default=0.001),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_stream(model),
        **write_heads(model),
        "sliding_window": model.attention.window or None,
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn,
        "router_aux_loss_coef": model.moe.aux_loss,
    }


def block(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Piece]:
    yield from norms(model, layer, theirs, ours)
    yield from grouped_attention(model, theirs, ours)
    yield from router(model, theirs + "block_sparse_moe.", ours + "moe.")
    yield from experts(model, theirs + "block_sparse_moe.", ours + "moe.", names=("w1", "w3", "w2"))


MIXTRAL = Family("mixtral", "MixtralForCausalLM", read, write, lambda model: table_of(model, block))
