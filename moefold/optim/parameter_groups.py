"""Parameter groups: which rule with which options updates a parameter, by its name.

A group is made of an entry of `optim.groups`; parameters that no entry matches are in the default group, which has the
rule `optim.rule` with the options of the section `optim`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from moefold.config.errors import UserError
from moefold.config.extensions import find_extension
from moefold.config.open_names import OPTIMIZER_NAMES
from moefold.config.optimizer_groups import (
    OptimizerGroup,
    first_match,
    parse_groups,
    refuse_idle_groups,
    refuse_matrix_rule,
)
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.adamw import AdamW
from moefold.optim.muon import Muon
from moefold.optim.rule import KeepsStatesOnHost, Rule, RuleMaker, WeighsMatrices
from moefold.shard.buckets import BucketGroup

DEFAULT_NAME = ""
BUILT_IN_RULES: dict[str, RuleMaker] = {"adamw": AdamW, "muon": Muon}


class GroupRule(NamedTuple):
    """The rule of a group, and its factor of the run's learning rate."""

    rule: Rule
    lr_factor: float


def find_rule(name: str) -> RuleMaker:
    """The built-in rule of that name, or the one that an extension registered."""
    extension = find_extension("optimizer_rule", name)
    if extension is not None:
        return extension.load()
    known = OPTIMIZER_NAMES.require(name)
    return BUILT_IN_RULES[known]


class ParameterGroups:
    """Rules by the name of a group: the pattern of its entry, or DEFAULT_NAME. A group whose rule is for matrices and
    not asked for by the entry itself has a second rule, AdamW with the same options, for the parameters that such a
    rule leaves out."""

    def __init__(self, optim: OptimConfig, kernels: BoundKernels):
        self.optim = optim
        self.kernels = kernels
        self.entries = parse_groups(optim.groups)
        self.rules: dict[str, GroupRule] = {}
        self.add_group(DEFAULT_NAME, OptimizerGroup())
        for entry in self.entries:
            if entry.pattern not in self.rules:
                self.add_group(entry.pattern, entry)

    def add_group(self, name: str, entry: OptimizerGroup) -> None:
        optim = self.optim
        rule_name = entry.rule or optim.rule
        make_rule = find_rule(rule_name)
        rule = make_rule(entry, optim, self.kernels)
        if optim.states == "host" and not isinstance(rule, KeepsStatesOnHost):
            kept = f"but the rule {rule_name} keeps its states on the device"
            raise UserError(f"optim.states = host, {kept}; set optim.states to device")
        self.rules[name] = GroupRule(rule, entry.lr)
        if rule.whole and entry.rule is None:
            rest = name_of_rest(name)
            adamw = AdamW(entry, optim, self.kernels)
            self.rules[rest] = GroupRule(adamw, entry.lr)

    def group_of(self, parameter: DeclaredParameter) -> BucketGroup:
        """The group of a parameter, for `fill_buckets`. The first entry that matches wins."""
        name = self.matching_pattern(parameter.name)
        rule = self.rules[name].rule
        if not rule.whole:
            return BucketGroup(name, "elements")
        rest = name_of_rest(name)
        if rest in self.rules and not is_hidden_matrix(parameter):
            return BucketGroup(rest, "elements")
        if parameter.matrix is None:
            refuse_matrix_rule(name, parameter.name, parameter.declaration.shape)
        return BucketGroup(name, "matrices")

    def cost_of(self, parameter: DeclaredParameter) -> float:
        """The cost of updating a parameter by a rule for matrices, for `fill_buckets`."""
        group = self.group_of(parameter)
        rule = self.rules[group.name].rule
        if isinstance(rule, WeighsMatrices):
            return rule.matrix_cost(parameter)
        return float(parameter.tensor.numel())

    def matching_pattern(self, name: str) -> str:
        entry = self.matching_entry(name)
        if entry is None:
            return DEFAULT_NAME
        return entry.pattern

    def matching_entry(self, name: str) -> OptimizerGroup | None:
        return first_match(self.entries, name)

    def is_frozen(self, name: str) -> bool:
        entry = self.matching_entry(name)
        return entry is not None and entry.frozen

    def freeze_parameters(self, model: nn.Module) -> None:
        """Let frozen parameters have no gradient: buckets and optimizer leave them out."""
        for name, parameter in model.named_parameters():
            if self.is_frozen(name):
                parameter.requires_grad_(False)

    def require_matches(self, names: Collection[str]) -> None:
        """Refuse entries that match none of the model's parameters, and entries that freeze all of them; `names` are
        those of all ranks."""
        refuse_idle_groups(self.entries, names)


def name_of_rest(name: str) -> str:
    """The group of the parameters that a rule for matrices leaves to AdamW."""
    return f"{name} (rest)"


def is_hidden_matrix(parameter: DeclaredParameter) -> bool:
    """Whether a rule for matrices takes a parameter unasked: a map between hidden vectors, no table of words, and no
    single row or column."""
    declaration = parameter.declaration
    matrix = declaration.matrix
    if matrix is None or declaration.rows == "words":
        return False
    return min(matrix) > 1
