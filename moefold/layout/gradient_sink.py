"""The gradient sink of a parameter: where backward writes the gradient, usually the parameter's place in a flat bucket.

Autograd passes a gradient on without copying it, so a gradient that was written in its place stays there: for large
weights this saves a pass over memory. A gradient written elsewhere is copied or added, as any other. If the place holds
a sum of earlier gradients, a product may add to that sum itself and return no gradient to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LendMemory = Callable[[torch.dtype], "torch.Tensor | None"]
RunningSum = Callable[[], "torch.Tensor | None"]


@dataclass(frozen=True)
class GradientSink:
    """`lend` returns the flat memory for a first gradient, or None if it is taken. `running_sum` returns that memory
    for a further gradient to be added to, or None if it holds no sum yet. `shape` is the parameter's."""

    shape: torch.Size
    lend: LendMemory
    running_sum: RunningSum

    def place(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory without values for a gradient of this type. It is lent once in a step."""
        memory = self.lend(dtype)
        return None if memory is None else memory.view(self.shape)

    def running(self) -> torch.Tensor | None:
        """The sum of the gradients so far. A caller that gets it must add to it and return no gradient to autograd."""
        total = self.running_sum()
        return None if total is None else total.view(self.shape)


def attach_gradient_sink(weight: torch.Tensor, lend: LendMemory, running: RunningSum) -> None:
    weight.sink = GradientSink(weight.shape, lend, running)  # pyright: ignore[reportAttributeAccessIssue]


def sink_of(weight: torch.Tensor) -> GradientSink | None:
    """The sink of the parameter that this tensor is, or is a view of."""
    return getattr(underlying_parameter(weight), "sink", None)


def memory_for_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Memory of the weight's shape and type, without values: the sink's place, or new memory if that is taken."""
    sink = sink_of(weight)
    place = None if sink is None else sink.place(weight.dtype)
    if place is None:
        return torch.empty_like(weight)
    return place.view(weight.shape)


def running_gradient_sum(weight: torch.Tensor) -> torch.Tensor | None:
    """The sum that the weight's next gradient may be added to in place, or None."""
    sink = sink_of(weight)
    total = None if sink is None else sink.running()
    return None if total is None else total.view(weight.shape)


def underlying_parameter(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that this tensor is, or is a view of."""
    return weight if weight._base is None else weight._base
