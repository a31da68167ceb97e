"""Sentences of advice: their form, and the shares of time and memory from which something is worth one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moefold.plan.advice.situation import Change, Situation, describe_change, in_trainer

NOTICEABLE = 0.05  # share of the step from which a wall is spoken of
NEARLY_FULL = 0.9  # share of the memory from which memory is short


@dataclass(frozen=True)
class Advice:
    """A sentence about a plan. `about`: the wall or the subject; `source`: guideline or table of the Megatron-Core MoE
    report, or equation of MegaScale-MoE."""

    about: str
    text: str
    source: str


AdviceRule = Callable[[Situation], Iterator[Advice]]


def propose(change: Change, result: str) -> str:
    """pipeline.vpp 4: 8% faster"""
    later = "" if in_trainer(change) else " (not in the trainer yet)"
    return f"{describe_change(change)}{later}: {result}"


def propose_faster(plan: Situation, change: Change, other: Situation) -> str:
    """The change with the speed and the memory of the plan that it leads to."""
    return propose(change, plan.describe_gain(other))
