"""Parameter groups: which rule with which options updates a parameter, by its name.

A group is made of an entry of `optim.groups`; parameters that no entry matches are in the default group, AdamW with
the options of the section `optim`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from moefold.config.errors import UserError, did_you_mean
from moefold.config.extensions import find_extension
from moefold.config.open_names import OPTIMIZER_NAMES
from moefold.config.optimizer_groups import OptimizerGroup, parse_groups
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.adamw import AdamW
from moefold.optim.rule import Rule, RuleMaker
from moefold.shard.buckets import BucketGroup

DEFAULT_NAME = ""
BUILT_IN_RULES: dict[str, RuleMaker] = {"adamw": AdamW}


class GroupRule(NamedTuple):
    """The rule of a group, and its factor of the run's learning rate."""

    rule: Rule
    lr_factor: float


def find_rule(name: str) -> RuleMaker:
    """The built-in rule of that name, or the one that an extension registered."""
    extension = find_extension("optimizer_rule", name)
    if extension is not None:
        return extension.load()
    return BUILT_IN_RULES[OPTIMIZER_NAMES.require(name)]


class ParameterGroups:
    def __init__(self, optim: OptimConfig, kernels: BoundKernels):
        self.entries = parse_groups(optim.groups)
        default = AdamW(OptimizerGroup(), optim, kernels)
        self.rules = {DEFAULT_NAME: GroupRule(default, 1.0)}
        for entry in self.entries:
            make_rule = find_rule(entry.rule)
            rule = make_rule(entry, optim, kernels)
            group = GroupRule(rule, entry.lr)
            self.rules.setdefault(entry.pattern, group)

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
