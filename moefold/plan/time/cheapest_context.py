"""The mechanism of context parallelism (`parallel.context`) of least predicted time: attention, and what it sends that
attention does not hide. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from moefold.config.context_rules import is_dynamic, largest_context_size
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES, all_to_all_context_has_heads
from moefold.config.run import Config
from moefold.kernels.facts import shares_sequences
from moefold.layout.fold import fold_into_grids, split_by_node
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.step_times import StepClock

MECHANISMS = ("ring", "all_to_all", "hierarchical", "all_gather")  # of several that take as long, the first
CONTEXT = "parallel.context"
COMPARED_LAYERS = 2  # the last ones: every second layer may have a window


def cheapest_context(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> str:
    """The mechanism of least time among those that are legal; that of the configuration where none is."""
    seconds = seconds_by_context(config, choices, gpu, world)
    if not seconds:
        return config.parallel.context
    return min(seconds, key=seconds.__getitem__)


def with_cheapest_context(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> Config:
    """The configuration with the mechanism of least time in place of `auto`, where ranks share a sequence."""
    if config.parallel.context != "auto" or not shares_sequences(config):
        return config
    name = cheapest_context(config, choices, gpu, world)
    return with_context(config, name)


def seconds_by_context(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> dict[str, float]:
    """Seconds of attention by every mechanism that this layout allows. Of dynamic sizes, in the largest group."""
    seconds: dict[str, float] = {}
    for name in MECHANISMS:
        candidate = with_context(config, name)
        if not is_legal_context(candidate, world):
            continue
        widest = in_largest_group(candidate, world)
        if name != "hierarchical" or node_shares_heads(widest, choices.node, world):
            seconds[name] = attention_seconds(widest, choices, gpu, world)
    return seconds


def with_context(config: Config, name: str) -> Config:
    return with_parallel(config, context=name)


def with_parallel(config: Config, **changes: Any) -> Config:
    parallel = replace(config.parallel, **changes)
    return replace(config, parallel=parallel)


def in_largest_group(config: Config, world: int) -> Config:
    """The configuration with the ranks of the largest group of dynamic sizes as its cp; with fixed sizes itself."""
    case = ConfigOnRanks(config, world)
    if not is_dynamic(case):
        return config
    size = largest_context_size(case)
    return with_parallel(config, cp=size, context_sizes="fixed", context_sending=())


def is_legal_context(config: Config, world: int) -> bool:
    """Whether the rules that concern the mechanism hold."""
    case = ConfigOnRanks(config, world)
    return all(rule.holds(case) for rule in RULES if CONTEXT in rule.reads)


def node_shares_heads(config: Config, node: int, world: int) -> bool:
    """Whether the cp ranks of a node, of so many ranks, can swap heads."""
    dense, _ = fold_into_grids(world, config.parallel)
    inside, _ = split_by_node(dense.partition("cp"), node)
    ranks = prod(digit.size for digit in inside)
    swapping = with_parallel(config, context="all_to_all", cp=ranks)
    case = ConfigOnRanks(swapping, world)
    return all_to_all_context_has_heads(case)


def attention_seconds(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> float:
    """Seconds of attention in one microbatch, forward and backward, in the compared layers."""
    setting = build_run_setting(config, world, choices)
    clock = StepClock(setting, gpu)
    layers = config.model.layers
    seconds = 0.0
    for layer in range(max(0, layers - COMPARED_LAYERS), layers):
        passes = clock.time_steps("t", layer)["attend"]
        seconds += sum(op.total for op in passes)
    return seconds
