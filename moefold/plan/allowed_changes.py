"""Changes of a plan that the trainer allows: those that break no rule which the plan itself keeps. A plan may have what
the trainer lacks, and still be compared with others of its kind."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import Config
from moefold.plan.launch import with_planned_memory
from moefold.plan.options import PlanChoices

RuleNames = frozenset[str]


def rules_broken_by(config: Config, choices: PlanChoices, gpus: int) -> RuleNames:
    """The rules that a planned run breaks, with its recompute, offload and graphs."""
    run = with_planned_memory(config, choices)
    case = ConfigOnRanks(run, gpus)
    broken = [rule.name for rule in RULES if not rule.holds(case)]
    return frozenset(broken)
