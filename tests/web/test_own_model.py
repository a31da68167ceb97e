"""A pasted config.json becomes a preset with keys changed: the planner then plans the model that the file describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moefold.checkpoint.hf.config_json import config_json_for, essential_values, family_for_model
from moefold.config.errors import UserError
from moefold.config.read import with_values
from moefold.presets.zoo import PRESETS, is_published_model
from moefold.web.own_model import own_model

SMALL_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
}


def pasted(options: Any) -> dict[str, Any]:
    return own_model({"config_json": json.dumps(options)})


def test_a_smaller_model_of_a_family_is_its_preset_with_the_sizes_changed():
    found = pasted(SMALL_QWEN)
    assert found["model"] == "qwen3-30b-a3b"
    changed = {key: value for key, value in found["keys"].items() if key != "model.dense_ffn"}
    assert changed == {
        "model.layers": "24",
        "model.hidden": "1024",
        "model.attention.heads": "16",
        "model.moe.experts": "64",
        "model.moe.top_k": "4",
        "model.moe.ffn": "512",
    }


@pytest.mark.parametrize("name", ["mixtral-8x7b", "olmoe-1b-7b", "deepseek-v3", "gpt-oss-20b", "glm-4.5-air"])
def test_the_config_of_a_preset_gives_its_model_again(name: str):
    """Written as `moefold convert` writes it."""
    model = PRESETS[name]().model
    found = pasted(config_json_for(family_for_model(model), model))
    assert is_published_model(found["model"])
    problems: dict[str, str] = {}
    made = with_values(PRESETS[found["model"]](), found["keys"], problems)
    assert problems == {}
    assert essential_values(made.model) == essential_values(model)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("[1]", "no object"),
        ('{"model_type": "bert"}', "there are: deepseek_v2"),
        (json.dumps({**SMALL_QWEN, "clip_everything": 3}), "clip_everything"),
        (json.dumps({**SMALL_QWEN, "hidden_size": "wide"}), "config.json"),
    ],
)
def test_what_is_no_config_of_a_family_is_refused_with_the_reason(text: str, why: str):
    with pytest.raises(UserError, match=why):
        own_model({"config_json": text})
