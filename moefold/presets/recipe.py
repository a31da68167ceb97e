"""Recipes: a preset's name or a YAML file, with overrides laid over it, resolved to a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moefold.config.errors import UserError, one_of
from moefold.config.read import flatten_sections, parse_overrides, read_yaml_mapping, with_values
from moefold.config.rules import ConfigOnRanks, broken_rules
from moefold.config.run import Config
from moefold.presets.zoo import PRESETS


def keep_config(config: Config) -> Config:
    return config


def resolve_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    world: int | None = 1,
    change: Callable[[Config], Config] = keep_config,
) -> Config:
    """The configuration of `recipe` and `overrides` on `world` ranks, or a refusal naming every problem. Without a
    world only the keys themselves are checked, not the rules that tie them together. `change` is applied to the recipe
    before the overrides are."""
    problems: dict[str, str] = {}
    config = change(recipe_base(recipe, problems))
    config = with_values(config, parse_overrides(overrides), problems)
    messages = list(problems.values())
    if world:
        messages += broken_rules(ConfigOnRanks(config, world), illegal=problems)
    if messages:
        raise UserError(*messages)
    return config


def recipe_base(recipe: str, problems: dict[str, str]) -> Config:
    """A preset, or a YAML file: its `preset` key (tiny if it has none) with its other keys laid over that."""
    if not recipe.endswith((".yaml", ".yml")):
        return make_preset(recipe)
    tree: Mapping[str, Any] = read_yaml_mapping(Path(recipe))
    values = flatten_sections(tree)
    preset = str(values.pop("preset", "tiny"))
    return with_values(make_preset(preset), values, problems)


def make_preset(name: str) -> Config:
    known_name = one_of("preset", name, PRESETS)
    return PRESETS[known_name]()
