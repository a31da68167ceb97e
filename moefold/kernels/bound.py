"""The implementation of every op that a run calls, chosen once, by facts that do not change while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from moefold.kernels.catalog import forced_implementations, pick_implementation
from moefold.kernels.facts import Facts
from moefold.kernels.registry import KernelOp

P = ParamSpec("P")
R = TypeVar("R")


class BoundKernels:
    """`kernels[swiglu](gate_up, weights)` calls what was chosen for the op `swiglu`. The op is the key, so an editor
    finds its reference and its types, and a new op is one file with its lines in the catalog: nothing here lists the
    ops."""

    def __init__(self, facts: Facts, force: Iterable[str] = ()):
        self.facts = facts
        self.forced = forced_implementations(force)
        self.chosen: dict[str, Callable[..., Any]] = {}
        for op, name in self.forced.items():  # one that cannot run is refused here, not when a run first calls it
            pick_implementation(op, facts, name)
        self.related: dict[Facts, BoundKernels] = {}  # for other facts

    def __getitem__(self, op: KernelOp[P, R]) -> Callable[P, R]:
        chosen = self.chosen
        if op.name not in chosen:
            name = self.implementation_name(op)
            implementation = op.implementations[name]
            chosen[op.name] = implementation
        return chosen[op.name]

    def implementation_name(self, op: KernelOp[P, R]) -> str:
        facts = self.facts
        forced = self.forced.get(op.name)
        name, _ = pick_implementation(op.name, facts, forced)
        return name

    def with_facts(self, **changes: Any) -> BoundKernels:
        """The choices for facts that differ from those of the run, such as the recipe of one product."""
        facts = replace(self.facts, **changes)
        if facts == self.facts:
            return self
        if facts not in self.related:
            kernels = BoundKernels(facts)
            kernels.forced = self.forced
            self.related[facts] = kernels
        return self.related[facts]
