"""Situation of a plan: where its time and memory go, and what a change of it would do, by planning the changed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from moefold.config.read import with_values
from moefold.config.run import Config, MemoryConfig
from moefold.plan.allowed_changes import RuleNames, rules_broken_by
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import TRAINER_VALUES, PlanChoices
from moefold.plan.time.dynamic_step import time_step
from moefold.plan.time.simulate_step import StepTime

WORTH_SAYING = 0.02  # of the time of a step

Change = dict[str, Any]  # values by key


@dataclass(frozen=True)
class Situation:
    setting: RunSetting
    gpu: Gpu
    fullest: RankMemory

    @cached_property
    def time(self) -> StepTime:
        return time_step(self.setting, self.gpu)

    @cached_property
    def broken_rules(self) -> RuleNames:
        return rules_broken_by(self.config, self.choices, self.setting.world)

    @property
    def config(self) -> Config:
        return self.setting.config

    @property
    def choices(self) -> PlanChoices:
        return self.setting.choices

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds

    @property
    def seconds_per_sequence(self) -> float:
        return self.seconds / self.config.train.global_batch

    @property
    def gib(self) -> float:
        """GiB of the fullest rank, what lies outside the allocator included."""
        return (self.fullest.total + self.fullest.outside) / GIB

    @property
    def fits(self) -> bool:
        return self.gib <= self.gpu.memory

    def share(self, seconds: float) -> float:
        """Share of the step."""
        return seconds / self.seconds

    def wall(self, name: str) -> float:
        """Share of the step that goes to a wall."""
        return self.share(self.time.walls[name])

    def changed(self, changes: Change) -> Situation | None:
        """The situation with other values of keys: of the configuration with a dot, else of `PlanChoices`. None where
        they break a rule that this one keeps."""
        of_run: dict[str, Any] = {}
        of_plan: dict[str, Any] = {}
        for path, value in changes.items():
            side = of_run if "." in path else of_plan
            side[path] = value
        problems: dict[str, str] = {}
        config = with_values(self.config, of_run, problems)
        config = replace(config, memory=MemoryConfig())  # the choices have the recomputed regions
        choices = replace(self.choices, **of_plan)
        world = self.setting.world
        if problems or rules_broken_by(config, choices, world) - self.broken_rules:
            return None
        return plan_situation(config, world, choices, self.gpu)

    def gain(self, other: Situation) -> float:
        """Share of the speed that the other has more."""
        return self.seconds_per_sequence / other.seconds_per_sequence - 1

    def is_better(self, other: Situation) -> bool:
        """Whether the other fits and is faster by enough to be worth a sentence."""
        return other.fits and self.gain(other) >= WORTH_SAYING

    def best_of(self, changes: Sequence[Change]) -> tuple[Change, Situation] | None:
        """The fastest of some changes that is better than this."""
        best: tuple[Change, Situation] | None = None
        for change in changes:
            other = self.changed(change)
            if other is None or not self.is_better(other):
                continue
            seconds = other.seconds_per_sequence
            if best is None or seconds < best[1].seconds_per_sequence:
                best = change, other
        return best

    def describe_gain(self, other: Situation) -> str:
        return f"{self.gain(other):.0%} faster, {other.gib:.1f} of {self.gpu.memory:.0f} GiB"


def plan_situation(config: Config, world: int, choices: PlanChoices, gpu: Gpu) -> Situation:
    setting = build_run_setting(config, world, choices)
    fullest = fullest_rank(memory_by_rank(setting))
    return Situation(setting, gpu, fullest)


def describe_change(change: Change) -> str:
    """pipeline.vpp 4, parallel.ep 8"""
    words: list[str] = []
    for path, value in change.items():
        shown = str(value)
        if isinstance(value, tuple):
            shown = ",".join(cast(tuple[str, ...], value))
        words.append(f"{path} {shown}")
    return ", ".join(words)


def in_trainer(change: Change) -> bool:
    """Whether the trainer has every choice of a change."""
    for path, value in change.items():
        known = TRAINER_VALUES.get(path, (value,))
        if value not in known:
            return False
    return True
