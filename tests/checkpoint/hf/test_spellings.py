"""Options in conflicting and odd spellings: read as `transformers` reads them, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_comparison import compare_with_transformers
from tests.support.hf_models import GLM, LLAMA3, MIXTRAL, OSS, QWEN2, QWEN3, SIZES, V2, V3, YARN

LINEAR = {"rope_type": "linear", "factor": 3.0}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
WINDOWS = ["sliding_attention"] * 3

SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling goes before rope_parameters": (
        "qwen3_moe",
        {**QWEN3, "rope_scaling": LINEAR, "rope_parameters": YARN, "rope_theta": 99.0},
    ),
    "and takes nothing from it": ("qwen3_moe", {**QWEN3, "rope_scaling": LINEAR, "rope_parameters": PLAIN}),
    "rope_scaling that is empty": ("qwen3_moe", {**QWEN3, "rope_scaling": {}, "rope_parameters": YARN}),
    "rope_scaling that is null": ("qwen3_moe", {**QWEN3, "rope_scaling": None, "rope_parameters": YARN}),
    "rope_theta inside and outside": ("qwen3_moe", {**QWEN3, "rope_parameters": PLAIN, "rope_theta": 99.0}),
    "rope_theta null outside": ("qwen3_moe", {**QWEN3, "rope_parameters": PLAIN, "rope_theta": None}),
    "rope_type goes before type": ("qwen3_moe", {**QWEN3, "rope_scaling": {**LINEAR, "type": "yarn"}}),
    "type alone": ("qwen3_moe", {**QWEN3, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "gpt-oss without positions": ("gpt_oss", OSS),
    "gpt-oss with null for positions": ("gpt_oss", {**OSS, "rope_parameters": None, "rope_scaling": None}),
    "gpt-oss with empty positions": ("gpt_oss", {**OSS, "rope_parameters": {}}),
    "yarn with null for truncate": ("qwen3_moe", {**QWEN3, "rope_parameters": {**YARN, "truncate": None}}),
    "yarn with null for factor": ("qwen3_moe", {**QWEN3, "rope_parameters": {**YARN, "factor": None}}),
    "yarn with zero betas": ("qwen3_moe", {**QWEN3, "rope_parameters": {**YARN, "beta_fast": 0, "beta_slow": 0}}),
    "yarn without its length": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 99.0}},
    ),
    "yarn with more rotations slow than fast": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 8.0}},
    ),
    "yarn with more rotations slow than fast, not rounded, latent": (
        "deepseek_v3",
        {**V3, "rope_parameters": {**YARN, "beta_fast": 0.5, "beta_slow": 4.0, "truncate": False}},
    ),
    "yarn of a length shorter than one rotation": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {**YARN, "original_max_position_embeddings": 4, "truncate": False}},
    ),
    "yarn with mscale alone": ("qwen3_moe", {**QWEN3, "rope_parameters": {**YARN, "mscale": 0.5}}),
    "yarn with both mscales, no latent": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "yarn with mscale alone, latent": ("deepseek_v3", {**V3, "rope_parameters": {**YARN, "mscale": 0.5}}),
    "llama3 without its length": (
        "mixtral",
        {
            **MIXTRAL,
            "rope_parameters": {
                name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"
            },
        },
    ),
    "a share of the dims inside and outside": (
        "glm4_moe",
        {**GLM, "partial_rotary_factor": 0.75, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    ),
    "a share of the dims outside": ("glm4_moe", {**GLM, "partial_rotary_factor": 0.75, "rope_parameters": PLAIN}),
    "a share of the dims in rope_scaling": (
        "glm4_moe",
        {**GLM, "rope_scaling": {**PLAIN, "partial_rotary_factor": 0.25}, "rope_theta": 10.0},
    ),
    "null for the share of the dims is all": ("glm4_moe", {**GLM, "partial_rotary_factor": None}),
    "more dense layers than layers": ("deepseek_v3", {**V3, "first_k_dense_replace": 5}),
    "more dense layers than layers, none ahead": (
        "deepseek_v3",
        {**V3, "first_k_dense_replace": 4, "num_nextn_predict_layers": 0},
    ),
    "more dense layers than layers, deepseek v2": ("deepseek_v2", {**V2, "first_k_dense_replace": 99}),
    "more dense layers than layers, glm": ("glm4_moe", {**GLM, "first_k_dense_replace": 4}),
    "head_dim that repeats the rope dims": ("deepseek_v3", {**V3, "head_dim": 8}),
    "head_dim that nobody reads": ("deepseek_v2", {**V2, "head_dim": 99}),
    "groups that nobody reads": ("deepseek_v2", {**V2, "topk_method": "greedy", "n_group": 3, "topk_group": 9}),
    "window 0 that nobody reads": ("qwen2_moe", {**QWEN2, "sliding_window": 0}),
    "no window in spite of use_sliding_window": (
        "qwen3_moe",
        {**QWEN3, "use_sliding_window": True, "sliding_window": None},
    ),
    "no window in spite of use_sliding_window, dense": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "gelu": ("mixtral", {**MIXTRAL, "hidden_act": "gelu"}),
    "gelu in experts, shared experts and dense layers": ("deepseek_v3", {**V3, "hidden_act": "gelu"}),
    "gelu by tanh": ("qwen2_moe", {**QWEN2, "mlp_only_layers": [0], "hidden_act": "gelu_pytorch_tanh"}),
    "gelu by tanh under its older name": ("glm4_moe", {**GLM, "hidden_act": "gelu_new"}),
    "relu": ("qwen3_moe", {**QWEN3, "hidden_act": "relu"}),
    "silu under its second name": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "hidden_act": "swish"}),
    "gelu in a dense model": ("llama", {"hidden_act": "gelu"}),
    "experts under both names": ("qwen3_moe", {**QWEN3, "num_local_experts": 4}),
    "experts under the second name": ("mixtral", {"num_experts": 6, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("case", SAME)
def test_a_spelling_is_read_as_transformers_reads_it(case: str, tmp_path: Path):
    kind, options = SAME[case]
    found = compare_with_transformers(kind, {**SIZES, **options}, tmp_path)
    assert found.verdict == "equal", found


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "squared relu of a gate": ("mixtral", {**MIXTRAL, "hidden_act": "relu2"}, "hidden_act = relu2"),
    "quick gelu": ("qwen3_moe", {**QWEN3, "hidden_act": "quick_gelu"}, "hidden_act = quick_gelu"),
    "an activation that gpt-oss does not read": (
        "gpt_oss",
        {**OSS, "hidden_act": "gelu"},
        "hidden_act = gelu",
    ),
    "linear without factor": ("qwen3_moe", {**QWEN3, "rope_scaling": {"type": "linear"}}, 'no "factor"'),
    "linear, factor null": (
        "qwen3_moe",
        {**QWEN3, "rope_scaling": {**LINEAR, "factor": None}},
        "factor = null",
    ),
    "yarn without factor": ("qwen3_moe", {**QWEN3, "rope_scaling": {"type": "yarn"}}, 'no "factor"'),
    "llama3 without factor": (
        "mixtral",
        {**MIXTRAL, "rope_parameters": {**LLAMA3, "factor": None}},
        "factor = null",
    ),
    "llama3 without its limits": (
        "mixtral",
        {**MIXTRAL, "rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        'no "low_freq_factor"',
    ),
    "null for the length before": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {**YARN, "original_max_position_embeddings": None}},
        "original_max_position_embeddings = null",
    ),
    "the length before outside": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": YARN, "original_max_position_embeddings": 32},
        "original_max_position_embeddings",
    ),
    "null for rope_type": ("qwen3_moe", {**QWEN3, "rope_parameters": {"rope_type": None}}, "rope_type = null"),
    "null for rope_theta": ("qwen3_moe", {**QWEN3, "rope_theta": None}, "rope_theta = null"),
    "null for it inside": (
        "qwen3_moe",
        {**QWEN3, "rope_parameters": {"rope_theta": None}},
        "rope_theta = null",
    ),
    "yarn with mscale_all_dim alone": (
        "deepseek_v3",
        {**V3, "rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
        "mscale_all_dim = 1.0",
    ),
    "no dims turn": ("glm4_moe", {**GLM, "partial_rotary_factor": 0.0}, "partial_rotary_factor = 0.0"),
    "no dims turn, inside": (
        "glm4_moe",
        {**GLM, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.0}},
        "partial_rotary_factor = 0.0",
    ),
    "null for the share of the dims inside": (
        "glm4_moe",
        {**GLM, "rope_parameters": {**PLAIN, "partial_rotary_factor": None}},
        "partial_rotary_factor = null",
    ),
    "an odd number of dims": ("glm4_moe", {**GLM, "partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2"),
    "head_dim of another width": ("deepseek_v3", {**V3, "head_dim": 16}, "head_dim = 16"),
    "rope dims in halves": ("deepseek_v3", {**V3, "rope_interleave": None}, "rope_interleave"),
    "window 0": ("mixtral", {**MIXTRAL, "sliding_window": 0}, "sliding_window = 0"),
    "window 0, dense": ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    "window 0, by half of the layers": ("gpt_oss", {**OSS, "sliding_window": 0}, "sliding_window = 0"),
    "window null, by half of the layers": ("gpt_oss", {**OSS, "sliding_window": None}, "sliding_window = null"),
    "window 0 that is used": (
        "qwen3_moe",
        {**QWEN3, "use_sliding_window": True, "sliding_window": 0},
        "sliding_window = 0",
    ),
    "windows in spite of use_sliding_window": ("qwen2_moe", {**QWEN2, "layer_types": WINDOWS}, "use_sliding_window"),
    "windows in spite of use_sliding_window, dense": ("qwen2", {"layer_types": WINDOWS}, "use_sliding_window"),
    "experts under a name of another family": ("qwen2_moe", {**QWEN2, "num_local_experts": 4}, "num_local_experts"),
    "experts under two names": ("qwen3_moe", {**QWEN3, "num_local_experts": 8}, "num_local_experts"),
    "a text for a flag": ("qwen3_moe", {**QWEN3, "norm_topk_prob": "false"}, "norm_topk_prob = false is not legal"),
    "choices under another name": (
        "gpt_oss",
        {"num_local_experts": 8, "head_dim": 16, "experts_per_token": 2},
        "experts_per_token = 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_spelling_that_nobody_can_follow_is_refused_by_name(case: str, tmp_path: Path):
    kind, options, said = REFUSED[case]
    found = compare_with_transformers(kind, {**SIZES, **options}, tmp_path)
    assert found.verdict in ("refused", "refused by both"), found
    assert said in found.text
