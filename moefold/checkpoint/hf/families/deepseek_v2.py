"""DeepSeek-V2: MLA, softmax routing limited to the groups with the best experts, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.families.deepseek_v3 import (
    latent_block_pieces,
    read_latent_options,
    table_with_shared_experts,
    write_latent_options,
)
from moefold.checkpoint.hf.family import ModelFamily
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.config.run import ModelConfig


def read_deepseek_v2(options: ConfigOptions) -> dict[str, Any]:
    values = read_latent_options(options)
    options.require_value("scoring_func", "softmax", why="as in DeepSeek-V2")
    options.require_value("norm_topk_prob", False, why="its two published codes differ in what that does")
    options.ignore_keys(["head_dim"])  # transformers sets it to qk_rope_head_dim
    options.require_value("mlp_bias", False, why="MLPs have no biases")
    groups, groups_chosen = read_groups(options)
    return values | {
        "moe.router.normalize": "none",
        "moe.router.groups": groups,
        "moe.router.groups_chosen": groups_chosen,
        "moe.router.group_score": "best",
    }


def read_groups(options: ConfigOptions) -> tuple[int, int]:
    """The groups of experts, and how many of them a token may choose from."""
    method = options.take_value("topk_method")
    if method == "greedy":
        options.ignore_keys(["n_group", "topk_group"])
        return 1, 1
    if method != "group_limited_greedy":
        options.add_problem(f"topk_method = {method} is not supported; expected greedy or group_limited_greedy")
    return options.take_value("n_group"), options.take_value("topk_group")


def write_deepseek_v2(model: ModelConfig) -> dict[str, Any]:
    router = model.moe.router
    return {
        **write_latent_options(model),
        "scoring_func": "softmax",
        "topk_method": "greedy" if router.groups == 1 else "group_limited_greedy",
        "norm_topk_prob": False,
        "n_group": router.groups,
        "topk_group": router.groups_chosen,
    }


def deepseek_v2_block_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    return latent_block_pieces(model, layer, theirs, ours, correction=False)


def deepseek_v2_table(model: ModelConfig) -> NameTable:
    return table_with_shared_experts(model, deepseek_v2_block_pieces)


DEEPSEEK_V2 = ModelFamily(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    read_deepseek_v2,
    write_deepseek_v2,
    deepseek_v2_table,
)
