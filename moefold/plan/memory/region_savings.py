"""Bytes that recomputing a region saves: what a microbatch on one rank keeps, without the region and with it.

The bytes of regions do not add up where regions overlap, or where one keeps what another makes.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.config.memory_regions import REBUILT_REGIONS, REGIONS, parse_offload, ranges_in_words, regions_by_layer
from moefold.config.run import Config, MemoryConfig, ModelConfig
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
        rest = kept_with(config, world, choices, (name,))
        saved[name] = everything - rest
    return saved


def kept_with(config: Config, world: int, choices: PlanChoices, recompute: tuple[str, ...]) -> float:
    memory = MemoryConfig(recompute=recompute)
    changed = replace(config, memory=memory)
    choices = replace(choices, recompute=recompute)
    setting = build_run_setting(changed, world, choices)
    first_rank = stages_by_rank(setting.config)[0]
    counts = stage_counts(setting, first_rank)
    return sum(stage.kept for stage in counts)


def offloaded_layers(config: Config) -> dict[str, str]:
    """By offloaded region: its layers in words."""
    offloaded = parse_offload(config.memory.offload, all_layers(config.model))
    in_words: dict[str, str] = {}
    for name, layers in offloaded.items():
        ranges = ranges_in_words(layers)
        in_words[name] = f"layers {ranges}"
    return in_words


def recomputed_layers(config: Config) -> dict[str, str]:
    """By recomputed region: its layers in words."""
    return regions_by_layer(config.memory.recompute, all_layers(config.model))


def sent_again(config: Config) -> dict[str, str]:
    """By recomputed region: the collectives that backward issues again on this layout, in words."""
    parallel = config.parallel
    by_region: dict[str, str] = {}
    for name in recomputed_layers(config):
        sent: list[str] = []
        if name == "core" and "heads" in parallel.tiles:
            continue  # heads arrive before it
        for collective in REGIONS[name].repeats:
            ranks = [getattr(parallel, axis) for axis in collective.axes]
            if max(ranks) > 1:
                sent.append(collective.what)
        if sent:
            by_region[name] = ", ".join(sent)
    return by_region


def all_layers(model: ModelConfig) -> int:
    return model.layers + model.mtp
