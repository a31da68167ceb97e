"""Parameters by the entries of `optim.groups`: how many have which rule, rate and decay, and which are frozen.

Torch-free; optim/parameter_groups.py makes the rules of a run of the same entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from moefold.anatomy.adapters import AdapterSpec, adapters_of_all_ranks
from moefold.anatomy.step_specs import prefixed_steps
from moefold.config.optimizer_groups import (
    OptimizerGroup,
    first_match,
    parse_groups,
    refuse_matrix_rule,
    without_numbers,
)
from moefold.config.run import Config, OptimConfig

WORD_TABLES = ("embedding.weight", "head.weight")  # left to AdamW unless an entry says otherwise
AS_THE_RUN = OptimizerGroup()  # options of parameters that no entry matches


class UpdatedWeight(NamedTuple):
    """A parameter by its full name. `decays`: it starts random, as norms, biases and B of adapters do not."""

    name: str
    shape: tuple[int, ...]
    decays: bool


@dataclass
class UpdateGroup:
    """Parameters that one entry gives to one rule. `pattern` is empty for those that no entry matches, `rule` for those
    that are frozen. `lr` is the peak rate, `decay` that of the `decaying` parameters among them."""

    pattern: str
    rule: str
    lr: float
    decay: float
    parameters: int = 0
    decaying: int = 0


def update_groups(config: Config) -> list[UpdateGroup]:
    """In the order of the entries; the parameters that none of them matches come last. An entry whose parameters all
    have entries before it has none. An entry that gives Muon what is no matrix is refused, as in a run."""
    optim = config.optim
    entries = parse_groups(optim.groups)
    found: dict[tuple[str, str], UpdateGroup] = {}
    for weight in trainable_weights(config):
        entry = first_match(entries, weight.name)
        pattern = entry.pattern if entry else ""
        group = entry or AS_THE_RUN
        rule = "" if group.frozen else rule_of(optim.rule, group, weight)
        if rule == "muon" and not weight.decays:
            refuse_matrix_rule(pattern, weight.name, weight.shape)
        key = (pattern, rule)
        if key not in found:
            found[key] = new_group(pattern, rule, group, optim)
        size = prod(weight.shape)
        found[key].parameters += size
        found[key].decaying += size * (weight.decays and bool(rule))
    ordered: list[UpdateGroup] = []
    for entry in entries:
        own = [group for group in found.values() if group.pattern == entry.pattern]
        ordered += own or [new_group(entry.pattern, entry.rule or optim.rule, entry, optim)]
    return ordered + [group for group in found.values() if not group.pattern]


def new_group(pattern: str, rule: str, group: OptimizerGroup, optim: OptimConfig) -> UpdateGroup:
    if not rule:
        return UpdateGroup(pattern, rule, 0.0, 0.0)
    decay = optim.weight_decay if group.decay is None else group.decay
    return UpdateGroup(pattern, rule, optim.lr * group.lr, decay)


def rule_of(run_rule: str, group: OptimizerGroup, weight: UpdatedWeight) -> str:
    """The rule that updates a parameter: its entry's, or that of the run, of which Muon takes matrices between hidden
    vectors alone."""
    if group.rule is not None or run_rule != "muon":
        return group.rule or run_rule
    is_between_hidden = weight.decays and weight.name not in WORD_TABLES
    return "muon" if is_between_hidden and min(weight.shape[-2:]) > 1 else "adamw"


def trainable_weights(config: Config) -> Iterator[UpdatedWeight]:
    """Every parameter of the model over all ranks, or of its adapters, which leave the others frozen."""
    adapters = adapters_of_all_ranks(config)
    for adapter in adapters:
        yield from weights_of_adapter(adapter)
    if adapters:
        return
    for prefix, step in prefixed_steps(config.model):
        for weight in step.weights:
            yield UpdatedWeight(prefix + weight.name, weight.shape, weight.is_matrix)


def weights_of_adapter(adapter: AdapterSpec) -> Iterator[UpdatedWeight]:
    product = adapter.product
    name = f"{product.name}.lora"
    yield UpdatedWeight(f"{name}.a", (adapter.experts, adapter.rank, product.inputs), True)
    yield UpdatedWeight(f"{name}.b", (adapter.experts, product.outputs, adapter.rank), False)
    if adapter.has_magnitude:
        yield UpdatedWeight(f"{name}.magnitude", (product.outputs,), False)


def frozen_parameters(config: Config) -> dict[str, int]:
    """The names that entries freeze, with how many parameters have them: a `*` stands for the number of a layer."""
    entries = parse_groups(config.optim.groups)
    names: Counter[str] = Counter()
    for weight in trainable_weights(config):
        group = first_match(entries, weight.name)
        if group is not None and group.frozen:
            names[without_numbers(weight.name)] += 1
    return dict(names)
