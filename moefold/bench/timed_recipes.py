"""Number formats that benchmarks time beside plain, with options of the section `precision` that change their speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moefold.api.moe_layer import MoeLayer, layer_recipes
from moefold.bench.clock import Work
from moefold.bench.options import TimedRecipeOptions
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.rules import check_config
from moefold.config.run import Config, PrecisionConfig
from moefold.layout.axes import World
from moefold.precision.recipes import attach_recipes
from moefold.precision.scale_histories import ScaleHistories
from moefold.train.assemble import choose_kernels

PrecisionKeys = dict[str, Any]


def with_precision_keys(config: Config, keys: PrecisionKeys) -> Config:
    """The configuration of one rank with keys of the section `precision`; what no run may have is refused."""
    precision = replace(config.precision, **keys)
    changed = replace(config, precision=precision)
    return check_config(changed, 1)


def set_precision_keys(module: MoeLayer, keys: PrecisionKeys) -> None:
    """Attach the layer's recipes once more, with these keys."""
    config = with_precision_keys(module.config, keys)
    kernels = choose_kernels(config, module.world)
    recipes = layer_recipes(config)
    attach_recipes(module.layer, recipes, kernels, config.precision)


def fill_histories(model: nn.Module, world: World, step: Work) -> None:
    """Record a step in the histories of delayed scales, from which later scales come."""
    histories = ScaleHistories(model, world)
    histories.write_places()
    histories.begin_step()
    step()
    sound = torch.tensor(True, device=world.device)
    histories.record_step(sound)
    histories.note_recorded()


def changed_keys(options: TimedRecipeOptions) -> PrecisionKeys:
    """The keys that differ from those of an ordinary run."""
    usual = PrecisionConfig()
    keys = options.precision_keys()
    return {key: value for key, value in keys.items() if value != getattr(usual, key)}


def keys_of_report(report: dict[str, Any]) -> dict[str, Any]:
    """Keys of precision that are not the usual ones. Reports of earlier versions have none."""
    return report.get("precision", {})


def recipes_title(report: dict[str, Any]) -> str:
    """What the recipes of a report have in common."""
    keys = keys_of_report(report)
    parts = [f"{key} {value}" for key, value in keys.items()]
    return ", ".join(["precision recipes", *parts])


def recipes_in(row: dict[str, Any]) -> list[str]:
    return [name for name in RECIPE_SPECS if name in row]
