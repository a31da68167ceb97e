"""A model of one's own on the planner's page: a pasted config.json becomes the nearest preset with keys changed.

So the model is part of the address, and of the command that the page shows, as any other key is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moefold.checkpoint.hf.config_json import TRAINING_KEYS, describe_options, with_legal_dense_layers
from moefold.config.errors import UserError
from moefold.config.keys import format_value, iterate_keys
from moefold.config.run import ModelConfig
from moefold.presets.zoo import PRESETS, is_published_model

JsonObject = dict[str, Any]
WHERE = "config.json"


def own_model(raw: Mapping[str, Any]) -> JsonObject:
    """The preset nearest to the pasted `config_json`, and the keys in which the model differs from it."""
    options = parse_config_json(str(raw.get("config_json", "")))
    described = describe_options(options, WHERE)
    model = with_legal_dense_layers(described.model)
    differing = {name: differing_keys(name, model) for name in filter(is_published_model, PRESETS)}
    nearest = min(differing, key=lambda name: len(differing[name]))
    return {"model": nearest, "keys": differing[nearest], "family": described.family.kind}


def parse_config_json(text: str) -> JsonObject:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the text is no JSON ({str(error)[:100]}); expected the whole of a {WHERE}") from None
    if not isinstance(options, dict):
        raise UserError(f"the text is JSON, but no object; expected the whole of a {WHERE}, from {{ to }}")
    return options


def differing_keys(preset: str, model: ModelConfig) -> dict[str, str]:
    """The model's values, as a command line has them, of keys that the preset has otherwise. Keys that act in training
    alone are the preset's: no config.json has them."""
    base = PRESETS[preset]().model
    values = {key.path: key.default for key in iterate_keys(base)}
    found: dict[str, str] = {}
    for key in iterate_keys(model):
        if key.path not in TRAINING_KEYS and key.default != values[key.path]:
            found[f"model.{key.path}"] = format_value(key.default)
    return found
