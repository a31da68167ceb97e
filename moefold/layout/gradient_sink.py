"""The gradient sink of a parameter: where backward writes the gradient, usually the parameter's place in a flat bucket.

Autograd passes a gradient on without copying it, so a gradient that was written in its place stays there: for large
weights this saves a pass over memory. A gradient written elsewhere is copied or added, as any other. If the place holds
a sum of earlier gradients, a product may add to that sum itself and return no gradient to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LendMemory = Callable[[torch.dtype], "Tensor | None"]
RunningSum = Callable[[], "Tensor | None"]


class FixedSum(Protocol):
    """The sum of a parameter's gradients, for a backward that is captured: its memory stays where it is."""

    def holds_sum(self) -> bool:
        """Whether the next gradient is added to others; the first is written."""
        ...

    def add(self, gradient: Tensor) -> None: ...

    def note_added(self) -> None:
        """Count a gradient that a replay has added."""
        ...


@dataclass(frozen=True)
class GradientSink:
    """`lend` returns the flat memory for a first gradient, or None if it is taken. `running_sum` returns that memory
    for a further gradient to be added to, or None if it holds no sum yet. `shape` is the parameter's.
    `total`: the sum itself."""

    shape: torch.Size
    lend: LendMemory
    running_sum: RunningSum
    total: FixedSum | None = None

    def place(self, dtype: torch.dtype) -> Tensor | None:
        """Memory without values for a gradient of this type. It is lent once in a step."""
        return self.in_shape(self.lend(dtype))

    def running(self) -> Tensor | None:
        """The sum of the gradients so far. A caller that gets it must add to it and return no gradient to autograd."""
        return self.in_shape(self.running_sum())

    def in_shape(self, flat: Tensor | None) -> Tensor | None:
        if flat is None:
            return None
        return flat.view(self.shape)


def attach_gradient_sink(weight: Tensor, lend: LendMemory, running: RunningSum, total: FixedSum | None = None) -> None:
    sink = GradientSink(weight.shape, lend, running, total)
    weight.sink = sink  # pyright: ignore[reportAttributeAccessIssue]


def sink_of(weight: Tensor) -> GradientSink | None:
    """The sink of the parameter that this tensor is, or is a view of."""
    parameter = underlying_parameter(weight)
    return getattr(parameter, "sink", None)


def memory_for_gradient(weight: Tensor) -> Tensor:
    """Memory of the weight's shape and type, without values: the sink's place, or new memory if that is taken."""
    sink = sink_of(weight)
    place = sink.place(weight.dtype) if sink else None
    if place is None:
        return torch.empty_like(weight)
    return place.view(weight.shape)


def running_gradient_sum(weight: Tensor) -> Tensor | None:
    """The sum that the weight's next gradient may be added to in place, or None."""
    sink = sink_of(weight)
    total = sink.running() if sink else None
    if total is None:
        return None
    return total.view(weight.shape)


def underlying_parameter(weight: Tensor) -> Tensor:
    """The parameter that this tensor is, or is a view of."""
    base = weight._base
    return weight if base is None else base
