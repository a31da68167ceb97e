"""Recipes: a preset's name or a YAML file, with overrides, resolved to a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moefold.config.errors import UserError, one_of
from moefold.config.read import flatten_sections, parse_overrides, read_yaml_mapping, with_values
from moefold.config.rules import ConfigOnRanks, broken_rules
from moefold.config.run import Config
from moefold.presets.zoo import PRESETS, PUBLISHED_RUNS, is_published_model

RUN_SIZE_KEYS = ("train.global_batch", "train.steps")


def keep_config(config: Config) -> Config:
    return config


def resolve_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    world: int | None = 1,
    change: Callable[[Config], Config] = keep_config,
) -> Config:
    """The configuration of `recipe` and `overrides` on `world` ranks, or a refusal with every problem. Without `world`
    only keys are checked, not the rules between them. `change` is applied to the recipe before the overrides."""
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
    """The configuration of a preset, or of a YAML file: the preset of its `preset` key (default tiny), changed by its
    other keys."""
    preset, values = read_recipe(recipe)
    return with_values(make_preset(preset), values, problems)


def read_recipe(recipe: str) -> tuple[str, dict[str, Any]]:
    """The preset of a recipe, and the keys that its file sets."""
    if not recipe.endswith((".yaml", ".yml")):
        return recipe, {}
    tree: Mapping[str, Any] = read_yaml_mapping(Path(recipe))
    values = flatten_sections(tree)
    preset = str(values.pop("preset", "tiny"))
    return preset, values


def unsaid_settings(recipe: str, overrides: Sequence[str]) -> list[str]:
    """A problem where a model of published size is to be trained and its batch or its number of steps is not given:
    those of a preset are no run's."""
    preset, values = read_recipe(recipe)
    given = {**values, **parse_overrides(overrides)}
    unsaid = [key for key in RUN_SIZE_KEYS if key not in given]
    if not unsaid or not is_published_model(preset):
        return []
    published = PUBLISHED_RUNS.get(preset)
    batch, steps, source = 64, 2000, "for a trial"
    if published is not None:
        batch, steps, source = published.global_batch, published.steps, f"as {preset} was trained"
    example = f"--train.global_batch {batch} --train.steps {steps}"
    return [f"{' and '.join(unsaid)} of a run of {preset} must be given, such as {example} ({source})"]


def make_preset(name: str) -> Config:
    known_name = one_of("preset", name, PRESETS)
    return PRESETS[known_name]()
