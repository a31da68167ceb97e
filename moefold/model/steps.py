"""The two ideas the model is written in: a layer is a list of steps, and a region is a named place inside a step.

A step takes the carry (everything a microbatch has with it at that point) and returns the next. Running them in order
is the plain forward; a pipeline may weave two such lists, a graph may capture the static ones. A region runs its
function as it is until a memory policy replaces `around`; the model does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moefold.anatomy.step_specs import StepSpec

Carry = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step of the anatomy with the code that does it."""

    spec: StepSpec
    run: Callable[[Carry], Carry]


def bind_steps(specs: Sequence[StepSpec], methods: Mapping[str, Callable[[Carry], Carry]]) -> list[Step]:
    """Each step of the anatomy with the method of its name."""
    return [Step(spec, methods[spec.name]) for spec in specs]


def drop_from_carry(carry: Carry, *names: str) -> Carry:
    """The carry without entries that no later step reads, so that their memory can be freed."""
    return {name: value for name, value in carry.items() if name not in names}


def run_step_sequence(steps: Sequence[Step], carry: Carry) -> Carry:
    for step in steps:
        carry = step.run(carry)
    return carry


def inside_recompute() -> bool:
    """Whether this forward runs inside a backward, to make again what a memory policy threw away. What is counted has
    been counted."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]


class Region(nn.Module):
    """A named place where a memory policy may act: keep, recompute, offload."""

    def __init__(self):
        super().__init__()
        self.around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fn: fn

    def forward(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        return self.around(fn)(*inputs)
