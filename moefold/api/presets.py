"""Configurations from Python: a preset's name and keys, with `__` where the command line has a dot."""

from __future__ import annotations

from typing import Any

from moefold.config.errors import UserError
from moefold.config.read import with_values
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.presets.recipe import resolve_recipe


def preset(name: str, ranks: int = 1, **keys: Any) -> Config:
    """The configuration of a preset or a YAML file, with keys changed: `preset("tiny", train__steps=20)`. Refused with
    every problem at once if a key is unknown, a value is illegal or a rule is broken on that many ranks."""
    base = resolve_recipe(name, world=None)
    changed = with_keys(base, keys)
    return check_config(changed, ranks)


def with_keys(config: Config, keys: dict[str, Any], section: str = "") -> Config:
    """The configuration with keys of a section changed, such as {"router__score": "sigmoid"} of "model.moe."."""
    values: dict[str, Any] = {}
    for name, value in keys.items():
        path = name.replace("__", ".")
        values[section + path] = value
    problems: dict[str, str] = {}
    changed = with_values(config, values, problems)
    if problems:
        raise UserError(*problems.values())
    return changed
