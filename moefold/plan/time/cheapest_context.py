"""The mechanism of context parallelism (`parallel.context`) of least predicted time: attention, and what it sends that
attention does not hide. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import Config
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.step_times import StepClock

MECHANISMS = ("ring", "all_to_all", "hierarchical", "all_gather")  # of several that take as long, the first
CONTEXT = "parallel.context"
COMPARED_LAYERS = 2  # the last ones: every second layer may have a window


def cheapest_context(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> str:
    """The mechanism of least time among those that are legal; that of the configuration where none is."""
    seconds: dict[str, float] = {}
    for name in MECHANISMS:
        candidate = with_context(config, name)
        if is_legal_context(candidate, world):
            seconds[name] = attention_seconds(candidate, choices, gpu, world)
    if not seconds:
        return config.parallel.context
    return min(seconds, key=lambda name: seconds[name])


def with_context(config: Config, name: str) -> Config:
    parallel = replace(config.parallel, context=name)  # pyright: ignore[reportArgumentType]
    return replace(config, parallel=parallel)


def is_legal_context(config: Config, world: int) -> bool:
    """Whether the rules that concern the mechanism hold."""
    case = ConfigOnRanks(config, world)
    return all(rule.holds(case) for rule in RULES if CONTEXT in rule.reads)


def attention_seconds(config: Config, choices: PlanChoices, gpu: Gpu, world: int) -> float:
    """Seconds of attention in one microbatch, forward and backward."""
    setting = build_run_setting(config, world, choices)
    clock = StepClock(setting, gpu)
    layers = config.model.layers
    seconds = 0.0
    for layer in range(max(0, layers - COMPARED_LAYERS), layers):
        passes = clock.time_steps("t", layer)["attend"]
        seconds += sum(op.total for op in passes)
    return seconds
