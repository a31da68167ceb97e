"""Parameter groups: which rule with which options updates a parameter, by its name.

A group is made of an entry of `optim.groups`; parameters that no entry matches are in the default group, AdamW with
the options of the section `optim`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from moefold.config.errors import UserError, did_you_mean, one_of
from moefold.config.optimizer_groups import OptimizerGroup, parse_groups
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.adamw import AdamW
from moefold.optim.rule import RULES, Rule
from moefold.shard.buckets import BucketGroup

DEFAULT_NAME = ""


class GroupRule(NamedTuple):
    """The rule of a group, and its factor of the run's learning rate."""

    rule: Rule
    lr_factor: float


class ParameterGroups:
    def __init__(self, optim: OptimConfig, kernels: BoundKernels):
        self.entries = parse_groups(optim.groups)
        default = AdamW(OptimizerGroup(), optim, kernels)
        self.rules: dict[str, GroupRule] = {DEFAULT_NAME: GroupRule(default, 1.0)}
        for entry in self.entries:
            make_rule = RULES[one_of("optimizer rule", entry.rule, RULES)]
            rule = make_rule(entry, optim, kernels)
            self.rules.setdefault(entry.pattern, GroupRule(rule, entry.lr))

    def group_of(self, parameter: DeclaredParameter) -> BucketGroup:
        """The group of a parameter, for `fill_buckets`. The first entry that matches wins."""
        name = self.matching_pattern(parameter.name)
        rule = self.rules[name].rule
        if not rule.whole:
            return BucketGroup(name, "elements")
        if parameter.matrix is None:
            raise UserError(
                f"optim.groups: {name} gives {parameter.name} to a rule for matrices, but its shape is "
                f"{parameter.declaration.shape} of a norm or bias; narrow the pattern, or put an entry before it"
            )
        return BucketGroup(name, "matrices")

    def matching_pattern(self, name: str) -> str:
        for entry in self.entries:
            if entry.matches(name):
                return entry.pattern
        return DEFAULT_NAME

    def require_matches(self, names: Collection[str]) -> None:
        """Refuse entries that match none of the model's parameters; `names` are those of all ranks."""
        problems: list[str] = []
        for entry in self.entries:
            if not any(entry.matches(name) for name in names):
                near = did_you_mean(entry.pattern, names)
                example = min(names, default="")
                problems.append(
                    f"optim.groups: {entry.pattern} matches no parameter{near}; expected a pattern such as {example}"
                )
        if problems:
            raise UserError(*problems)
