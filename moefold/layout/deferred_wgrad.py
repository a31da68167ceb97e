"""Deferred weight gradients: backward returns the data gradient at once and the weight gradient on request.

    D   dx = dy W          the previous pipeline stage waits for it
    W   dW = dy^T x        no other rank waits for it: it can fill a bubble

While `deferring_weight_grads(queue)` is open, backward passes append their weight gradients to the queue as work to be
done; otherwise they compute them at once. The results are equal to the bit. Every backward that computes a weight
gradient by itself calls `gradient_or_defer`: linear products (kernels/linear/product.py) and the fused expert MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.layout.gradient_sink import underlying_parameter

DeferredWork = Callable[[], None]
ComputeGradient = Callable[[], Tensor | None]  # None: the gradient was added to a running sum in place

OPEN_QUEUES: list[list[DeferredWork]] = []  # a stack; not thread-local, since autograd runs on threads of its own


class DeferredGradient(NamedTuple):
    """A weight's gradient, as work to be done."""

    weight: Tensor
    compute_gradient: ComputeGradient

    def __call__(self) -> None:
        with torch.no_grad():
            gradient = self.compute_gradient()
        deliver_gradient(self.weight, gradient)


def open_queue() -> list[DeferredWork] | None:
    """The queue that weight gradients go into; None: they are computed at once."""
    return OPEN_QUEUES[-1] if OPEN_QUEUES else None


@contextmanager
def deferring_weight_grads(queue: list[DeferredWork]) -> Iterator[None]:
    """Weight gradients of backward passes inside the block go into `queue`; of nested blocks the inner one's."""
    OPEN_QUEUES.append(queue)
    try:
        yield
    finally:
        OPEN_QUEUES.pop()


def gradient_or_defer(weight: Tensor, compute_gradient: ComputeGradient) -> Tensor | None:
    """The weight's gradient now; or None, and the gradient is delivered when the queued work is run. A frozen weight
    has none. That of a computed weight, such as a clone that another rank has sent, is never deferred: backward goes on
    from it."""
    if not underlying_parameter(weight).requires_grad:
        return None
    queue = open_queue()
    if queue is None or is_computed(weight):
        return compute_gradient()
    deferred = DeferredGradient(weight, compute_gradient)
    queue.append(deferred)
    return None


def is_computed(weight: Tensor) -> bool:
    return not underlying_parameter(weight).is_leaf


def deliver_gradient(weight: Tensor, gradient: Tensor | None) -> None:
    """Add the gradient to the weight as a backward pass would. Hooks on the parameter run even if there is none."""
    if gradient is not None:
        torch.autograd.backward([weight], [gradient])
    else:
        EmptyGradient.apply(weight).backward()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class EmptyGradient(torch.autograd.Function):
    """A scalar whose backward reaches the weight without a gradient, so that the weight's hooks run."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None
