"""Observed steps: observers are called around each step in forward and, by identity nodes between steps, in backward.

    forward     before F | step 0 | after F  o  before F | step 1 | after F
    backward    after D  | step 0 | before D o  after D  | step 1 | before D        o: identity node, the border

All differentiable tensors of the carry pass through one border, so its backward runs when the later step's gradients
are complete and none of the earlier step's has begun. Without observers nothing here runs and no border is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.model.steps import Around, Carry, PassKey, PassKind, Step

Crossing = Callable[[], None]  # what a border calls in backward


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class StepBorder(torch.autograd.Function):
    """The identity on its tensors. Its backward calls `cross` first."""

    @staticmethod
    def forward(ctx: Any, cross: Crossing, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cross = cross
        ctx.set_materialize_grads(False)
        outputs = [x.detach() for x in tensors]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.cross()
        return None, *gradients


def carry_through_border(carry: Carry, cross: Crossing) -> Carry:
    """The same carry behind a border. A tensor that the carry holds twice stays one tensor."""
    flat, structure = tree_flatten(carry)
    inputs: dict[int, Tensor] = {}
    for leaf in flat:
        if is_differentiable(leaf):
            inputs[id(leaf)] = leaf
    if not inputs:
        return carry
    tensors = inputs.values()
    outputs = StepBorder.apply(cross, *tensors)
    crossed = dict(zip(inputs, outputs, strict=True))  # pyright: ignore[reportArgumentType]
    leaves = [crossed.get(id(leaf), leaf) for leaf in flat]
    return tree_unflatten(leaves, structure)


class ObservedSteps:
    """A run of steps of one pass with the observers around each."""

    def __init__(self, steps: Sequence[Step], observers: Sequence[Around], key: PassKey):
        self.steps = steps
        self.observers = observers
        self.key = key
        self.in_backward: Step | None = None

    def forward(self, carry: Carry) -> Carry:
        previous: Step | None = None
        for step in self.steps:
            if previous is not None:
                cross = partial(self.cross_border, previous)
                carry = carry_through_border(carry, cross)
            self.notify_before(step, "F")
            carry = step.run(carry)
            self.notify_after(step, "F")
            previous = step
        return carry

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """The backward of all steps: the last begins with it; the one that it reaches last ends with it."""
        self.in_backward = self.steps[-1]
        self.notify_before(self.in_backward, "D")
        yield
        self.notify_after(self.in_backward, "D")
        self.in_backward = None

    def cross_border(self, earlier: Step) -> None:
        """Backward leaves one step and comes to the step before it."""
        assert self.in_backward is not None, "the backward of observed steps runs inside `around_backward`"
        self.notify_after(self.in_backward, "D")
        self.in_backward = earlier
        self.notify_before(earlier, "D")

    def notify_before(self, step: Step, kind: PassKind) -> None:
        key = self.key
        for observer in self.observers:
            observer.before(step, kind, key)

    def notify_after(self, step: Step, kind: PassKind) -> None:
        key = self.key
        for observer in reversed(self.observers):
            observer.after(step, kind, key)
