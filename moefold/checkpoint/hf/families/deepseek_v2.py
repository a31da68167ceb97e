"""DeepSeek-V2: latent attention, softmax routing within the groups of the best experts, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.families.deepseek_v3 import latent_block, read_latents, write_latents
from moefold.checkpoint.hf.family import Family
from moefold.checkpoint.hf.names import table_of
from moefold.checkpoint.hf.options import Options
from moefold.checkpoint.hf.piece import Piece
from moefold.config.run import ModelConfig


def read(options: Options) -> dict[str, Any]:
    values = read_latents(options)
    options.demand("scoring_func", "softmax", why="as in DeepSeek-V2")
    options.demand("norm_topk_prob", False, why="its two published codes differ in what that does")
    options.demand("mlp_bias", False, why="MLPs have no biases")
    groups, chosen = options.optional("n_group") or 1, options.optional("topk_group") or 1
    method = options.take("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        options.refuse(f"topk_method = {method} is not supported; expected greedy or group_limited_greedy")
    limited = method == "group_limited_greedy"
    return values | {
        "moe.normalize": "none",
        "moe.groups": groups if limited else 1,
        "moe.groups_chosen": chosen if limited else 1,
        "moe.group_score": "best",
    }


def write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_latents(model),
        "scoring_func": "softmax",
        "topk_method": "greedy" if model.moe.groups == 1 else "group_limited_greedy",
        "norm_topk_prob": False,
        "n_group": model.moe.groups,
        "topk_group": model.moe.groups_chosen,
    }


def block(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[Piece]:
    return latent_block(model, layer, theirs, ours, correction=False)


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", read, write, lambda model: table_of(model, block))
