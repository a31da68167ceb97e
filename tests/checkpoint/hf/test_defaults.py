"""Every key of every family's config.json: dropped, null and changed, it means what it means to `transformers`, or is
refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from moefold.checkpoint.hf.config_options import HARMLESS_KEYS
from moefold.checkpoint.hf.published_defaults import CLASS_DEFAULTS, FILE_DEFAULTS, family_keys
from tests.support.hf_comparison import CLASSES, TOLERANCE, WRONG, Comparison, compare_with_transformers
from tests.support.hf_models import GLM, LLAMA3, MIXTRAL, OLMOE, OSS, QWEN2, QWEN3, SIZES, V2, V3, YARN, hf

# Tiny settings in which every key matters.
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTRAL, "sliding_window": 6, "head_dim": 16, "rope_parameters": LLAMA3},
    "olmoe": {**OLMOE, "norm_topk_prob": True, "attention_bias": True, "rope_parameters": YARN},
    "qwen3_moe": {**QWEN3, **WINDOW, "norm_topk_prob": True, "rope_parameters": YARN, "mlp_only_layers": [0]},
    "qwen2_moe": {
        **QWEN2,
        **WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": YARN,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {**V3, "rope_parameters": LATENT_YARN, "routed_scaling_factor": 1.5, "rope_interleave": True},
    "kimi_k2": {**V3, "rope_parameters": LATENT_YARN, "norm_topk_prob": False},
    "deepseek_v2": {**V2, "rope_parameters": LATENT_YARN},
    "gpt_oss": {**OSS, "rope_parameters": YARN, "attention_bias": False},
    "glm4_moe": {
        **GLM,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.25,
        "rope_parameters": YARN,
    },
    "llama": {"rope_parameters": YARN, "head_dim": 16, "attention_bias": True},
    "mistral": {"sliding_window": 6, "head_dim": 16, "rope_parameters": YARN},
    "qwen2": {**WINDOW, "max_window_layers": 0, "rope_parameters": YARN},
    "qwen3": {**WINDOW, "max_window_layers": 0, "head_dim": 16, "rope_parameters": YARN},
}
CHANGES: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.25,
    "aux_loss_alpha": 0.5,
    "clip_qkv": 0.5,
    "decoder_sparse_step": 2,
    "experts_per_token": 3,
    "first_k_dense_replace": 2,
    "head_dim": 12,
    "hidden_act": "gelu",
    "hidden_size": 48,
    "initializer_range": 0.5,
    "intermediate_size": 40,
    "kv_lora_rank": 20,
    "layer_types": ["full_attention", "full_attention", "full_attention"],
    "max_position_embeddings": 100,
    "max_window_layers": 2,
    "mlp_bias": True,
    "mlp_only_layers": [0, 1],
    "moe_intermediate_size": 40,
    "moe_layer_freq": 2,
    "n_group": 2,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "norm_topk_prob": False,
    "num_attention_heads": 8,
    "num_experts": 6,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 6,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 2,
    "partial_rotary_factor": 0.75,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 4,
    "qkv_bias": False,
    "rms_norm_eps": 0.01,
    "rope_interleave": False,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_theta": 77.0,
    "routed_scaling_factor": 0.75,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.25,
    "scoring_func": "tanh",
    "seq_aux": False,
    "shared_expert_intermediate_size": 8,
    "sliding_window": 3,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 0.25,
    "tie_word_embeddings": True,
    "topk_group": 3,
    "topk_method": "best",
    "use_qk_norm": False,
    "use_sliding_window": False,
    "v_head_dim": 20,
    "vocab_size": 56,
}
OUR_KEYS = {  # in refusals by the rules for all models
    "num_attention_heads": "model.attention.head",
    "num_key_value_heads": "model.attention.kv_heads",
    "num_experts_per_tok": "model.moe.top_k",
    "n_group": "model.moe.router.groups",
    "topk_group": "model.moe.router.groups_chosen",
}
MORE_KEYS = ["rope_scaling", "rope_theta", "head_dim", "num_local_experts", "num_experts"]  # that no class declares
LATENT_KEYS = ["aux_loss_alpha", "seq_aux", "scoring_func", "topk_method", "moe_layer_freq"]
FAMILY_KEYS = {
    "gpt_oss": ["experts_per_token"],
    "glm4_moe": ["partial_rotary_factor", "num_nextn_predict_layers"],
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": [*LATENT_KEYS, "num_nextn_predict_layers"],
    "kimi_k2": [*LATENT_KEYS, "num_nextn_predict_layers"],
}


def class_keys(kind: str) -> list[str]:
    """The keys of a config class that are not those of every model."""
    config = getattr(hf(), CLASSES[kind] + "Config")
    of_every_model = {field.name for field in fields(hf().PreTrainedConfig)}
    return [field.name for field in fields(config) if field.name not in of_every_model]


def keys_of(kind: str) -> list[str]:
    keys = [*class_keys(kind), *MORE_KEYS, *FAMILY_KEYS.get(kind, [])]
    return sorted(set(keys) - HARMLESS_KEYS)


def cases() -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for kind in SETTINGS:
        for key in keys_of(kind):
            found += [(kind, key, action) for action in ("dropped", "null", "changed")]
    return found


def acted_on(options: dict[str, Any], key: str, action: str) -> dict[str, Any]:
    if action == "dropped":
        return {name: value for name, value in options.items() if name != key}
    return {**options, key: None if action == "null" else CHANGES[key]}


@cache
def compared(kind: str, text: str, tolerance: float) -> Comparison:
    """Once for all cases with this text of config.json: a key that is not in the file may be dropped."""
    with TemporaryDirectory() as folder:
        return compare_with_transformers(kind, json.loads(text), Path(folder), tolerance=tolerance)


@pytest.mark.parametrize(("kind", "key", "action"), cases())
def test_a_key_means_what_it_means_to_transformers_or_is_refused_by_name(kind: str, key: str, action: str):
    options = {**SIZES, **SETTINGS[kind]}
    tolerance = 1e-4 if key in ("hidden_size", "num_hidden_layers") else TOLERANCE  # thousands of dims, 61 layers
    found = compared(kind, json.dumps(acted_on(options, key, action)), tolerance)
    assert found.verdict not in WRONG, found
    if found.verdict != "equal":
        assert key in found.text or OUR_KEYS.get(key, key) in found.text


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_table_of_defaults_is_that_of_the_config_classes(kind: str):
    config = getattr(hf(), CLASSES[kind] + "Config")
    expected = {field.name: field.default for field in fields(config) if field.name in class_keys(kind)}
    second_names = config.attribute_map
    for name in list(expected):
        if name in second_names and name not in CLASS_DEFAULTS[kind]:
            expected[second_names[name]] = expected.pop(name)  # declared under its second name
    rope = config().rope_parameters
    expected["rope_theta"] = rope.pop("rope_theta")
    expected["rope_scaling"] = None
    if "partial_rotary_factor" in rope:
        expected["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    expected["rope_parameters"] = None if rope == {"rope_type": "default"} else rope
    assert CLASS_DEFAULTS[kind] == {name: value for name, value in expected.items() if name not in HARMLESS_KEYS}


@pytest.mark.parametrize("kind", SETTINGS)
def test_second_names_are_those_of_the_config_classes(kind: str):
    theirs = getattr(hf(), CLASSES[kind] + "Config").attribute_map
    ours = family_keys(kind).second_names
    assert {frozenset(pair) for pair in ours.items()} == {frozenset(pair) for pair in theirs.items()}


@pytest.mark.parametrize("kind", SETTINGS)
def test_keys_of_files_alone_are_not_of_the_config_classes(kind: str):
    assert not set(FILE_DEFAULTS.get(kind, {})) & set(class_keys(kind))


LONG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kind", "options", "length"),
    [
        ("gpt_oss", OSS, 144),
        ("mistral", {}, 4112),
        ("qwen2_moe", {**QWEN2, "use_sliding_window": True}, 4112),
        ("qwen3_moe", {**QWEN3, "use_sliding_window": True}, 4112),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4112),
        ("qwen3", {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 0}, 4112),
    ],
)
def test_an_absent_window_is_the_published_one(kind: str, options: dict[str, Any], length: int, tmp_path: Path):
    """On sequences that are longer than it, by a config.json without sliding_window."""
    without = {**SIZES, **LONG, **options}
    without.pop("sliding_window", None)
    assert compare_with_transformers(kind, without, tmp_path / "absent", length).verdict == "equal"
    window = family_keys(kind).defaults["sliding_window"]
    assert length > window > length - 20
