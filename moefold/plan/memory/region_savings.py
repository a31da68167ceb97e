"""Bytes that recomputing a region saves: what a microbatch on one rank keeps, without the region and with it.

The bytes of regions do not add up where regions overlap, or where one keeps what another makes.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.config.memory_regions import REBUILT_REGIONS, regions_by_layer
from moefold.config.run import Config, MemoryConfig
from moefold.plan.memory.peak_memory import stage_counts
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.memory.run_setting import build_run_setting
from moefold.plan.options import PlanChoices


def saved_by_regions(config: Config, world: int, choices: PlanChoices) -> dict[str, float]:
    """By region: the bytes of one microbatch on the first pipeline rank that its recompute saves, in all layers of the
    rank."""
    everything = kept_with(config, world, choices, ())
    saved: dict[str, float] = {}
    for name in REBUILT_REGIONS:
        saved[name] = everything - kept_with(config, world, choices, (name,))
    return saved


def kept_with(config: Config, world: int, choices: PlanChoices, recompute: tuple[str, ...]) -> float:
    changed = replace(config, memory=MemoryConfig(recompute=recompute))
    setting = build_run_setting(changed, world, replace(choices, recompute=recompute))
    first_rank = stages_by_rank(setting.config)[0]
    return sum(stage.kept for stage in stage_counts(setting, first_rank))


def recomputed_layers(config: Config) -> dict[str, str]:
    """By recomputed region: its layers in words."""
    layers = config.model.layers + config.model.mtp
    return regions_by_layer(config.memory.recompute, layers)
