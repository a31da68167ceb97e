"""Kernels bound to a run: the implementation of every op that it calls, chosen once from the run's facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from moefold.kernels.catalog import forced_implementations, pick_implementation
from moefold.kernels.facts import Facts
from moefold.kernels.registry import KernelOp

P = ParamSpec("P")
R = TypeVar("R")


class BoundKernels:
    """`kernels[swiglu](gate_up, weight)` calls the implementation chosen for the op `swiglu`.

    The op is the key: an editor finds its reference and its types, and a new op is one file with its catalog lines.
    """

    def __init__(self, facts: Facts, force: Iterable[str] = ()):
        self.facts = facts
        self.forced = forced_implementations(force)
        self.chosen: dict[str, Callable[..., Any]] = {}
        for op, name in self.forced.items():
            pick_implementation(op, facts, name)  # refuses now what cannot run here

    def __getitem__(self, op: KernelOp[P, R]) -> Callable[P, R]:
        if op.name not in self.chosen:
            forced = self.forced.get(op.name)
            name, _ = pick_implementation(op.name, self.facts, forced)
            self.chosen[op.name] = op.implementations[name]
        return self.chosen[op.name]

    def with_implementation(self, op: KernelOp[P, R], implementation: Callable[P, R]) -> BoundKernels:
        """The same choices except for one op."""
        other = BoundKernels(self.facts)
        other.forced = self.forced
        other.chosen = {**self.chosen, op.name: implementation}
        return other
