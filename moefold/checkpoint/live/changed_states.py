"""Changed states: what a run whose rules of the optimizer are not those of a checkpoint does with the states there.

A parameter's states are taken over if the checkpoint has every kind that its rule wants. Else all of them begin anew:
AdamW corrects both moments by one count of updates, so that a mean is of no use beside a new mean square. Kinds that no
rule wants are left in the checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from moefold.checkpoint.format.ledger import Ledger
from moefold.checkpoint.format.verify import BEGUN_AFTER
from moefold.checkpoint.live.load import STATE_PREFIX, FoundCheckpoint, weight_of_main
from moefold.checkpoint.live.logical_tensors import LogicalTensors
from moefold.comm.host_objects import union_of_sets
from moefold.layout.axes import World

StateNames = frozenset[str]  # of logical tensors
Parameters = dict[str, list[str]]  # with the kinds of their states


class ChangedStates(NamedTuple):
    """The states of all ranks that begin anew, and those that are left in the checkpoint."""

    new: StateNames = StateNames()
    left: StateNames = StateNames()

    def taken_over(self, tensors: LogicalTensors) -> LogicalTensors:
        return {name: tensor for name, tensor in tensors.items() if name not in self.new}

    def begun_after(self, found: FoundCheckpoint, updates: int) -> dict[str, int]:
        """By parameter, after how many updates its states began, if not with the run; those that are new, after so
        many."""
        saved: Mapping[str, int] = found.state.get(BEGUN_AFTER, {})
        gone = kinds_by_parameter(self.left)
        begun = {name: count for name, count in saved.items() if name not in gone}
        for name in kinds_by_parameter(self.new):
            begun[name] = updates
        return begun

    def notes(self) -> Iterator[str]:
        for kinds, names in parameters_by_kinds(self.new):
            yield f"note: new states ({kinds}), which the checkpoint lacks, of {named(names)}"
        for kinds, names in parameters_by_kinds(self.left):
            yield f"note: states ({kinds}) are left in the checkpoint, since no rule wants them, of {named(names)}"


def compare_states(ledger: Ledger, tensors: LogicalTensors, world: World) -> ChangedStates:
    """What becomes of the states in a checkpoint; `tensors` are those of the run on this rank."""
    held = set(filter(is_rule_state, tensors))
    wanted = union_of_sets(held, world.pp)  # pipeline ranks hold different tensors
    missing = wanted - ledger.keys()
    incomplete = kinds_by_parameter(missing)
    new = StateNames(name for name in wanted if parameter_and_kind(name)[0] in incomplete)
    saved = StateNames(filter(is_rule_state, ledger))
    left = saved - (wanted - new)
    return ChangedStates(new, left)


def is_rule_state(name: str) -> bool:
    """Whether a logical tensor is state of a rule: main weights are those of any rule."""
    return name.startswith(STATE_PREFIX) and weight_of_main(name) is None


def parameter_and_kind(name: str) -> tuple[str, str]:
    parameter, _, kind = name.removeprefix(STATE_PREFIX).rpartition(".")
    return parameter, kind


def kinds_by_parameter(names: Iterable[str]) -> Parameters:
    found = defaultdict[str, list[str]](list)
    for name in sorted(names):
        parameter, kind = parameter_and_kind(name)
        found[parameter].append(kind)
    return dict(found)


def parameters_by_kinds(names: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Parameters with the same kinds of state; the kinds as text."""
    found = defaultdict[str, list[str]](list)
    for parameter, kinds in kinds_by_parameter(names).items():
        found[", ".join(kinds)].append(parameter)
    return found.items()


def named(parameters: list[str]) -> str:
    count = len(parameters)
    first = parameters[0]
    if count == 1:
        return f"one parameter: {first}"
    return f"{count} parameters, such as {first}"
