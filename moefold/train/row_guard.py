"""Row guard: a step in which rows of experts found no room changes nothing, and is run again without the bound.

    on the device    flag of any rank -> no update, and what the step has judged by (loss scale, spikes, clipping) is as
                     before it
    on the host      reads the flag behind the step, and computes the step again on the same batch, with bounds lifted

There are two bounds: the pool of the stash (`memory.stash`; rows then lie in tensors of their own), and the rooms of
the symmetric dispatcher (`parallel.room`; tokens then travel by collectives).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from moefold.checkpoint.live.logical_tensors import StateProvider
from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.layout.axes import World
from moefold.memory.stash import stash_of
from moefold.model.moe.layer import symmetric_dispatchers
from moefold.model.transformer import Transformer
from moefold.optim.loss_scale import LossScale

Tensors = Sequence[Tensor]


class RowBound(Protocol):
    """A bound of rows whose number the device alone knows."""

    def begin_step(self) -> None: ...

    def overflowed(self) -> Tensor:
        """Whether rows of this rank have found no room since the step began, on the device."""
        ...

    def lifted(self) -> AbstractContextManager[None]:
        """There is room for all rows inside."""
        ...


class StepGuard(Protocol):
    overflowed: Tensor | None  # whether rows of any rank found no room in the last step
    repeated_steps: int  # since the start

    def begin_step(self) -> None: ...

    def allow(self, updates: Tensor) -> Tensor:
        """Whether the step may update anything, once it is judged."""
        ...

    def lifted(self) -> AbstractContextManager[None]:
        """No rows are bounded inside."""
        ...


class NoBounds:
    """Rows have room, or the run ends."""

    overflowed: Tensor | None = None
    repeated_steps = 0

    def begin_step(self) -> None: ...

    def allow(self, updates: Tensor) -> Tensor:
        return updates

    def lifted(self) -> AbstractContextManager[None]:
        return nullcontext()


class RowGuard:
    """`judged`: tensors that a step writes whether or not it updates anything."""

    def __init__(self, bounds: Sequence[RowBound], judged: Tensors, world: World):
        self.bounds = bounds
        self.judged = list(judged)
        self.everyone = world.everyone
        self.before: list[Tensor] = []
        self.overflowed: Tensor | None = None
        self.repeated_steps = 0

    def begin_step(self) -> None:
        for bound in self.bounds:
            bound.begin_step()
        self.before = [x.clone() for x in self.judged]

    @torch.no_grad()
    def allow(self, updates: Tensor) -> Tensor:
        flags = [bound.overflowed() for bound in self.bounds]
        own = torch.stack(flags).any()
        flag = all_reduce_max_no_grad(own.int(), self.everyone)
        overflowed = flag > 0
        allowed = updates & ~overflowed
        for x, before in zip(self.judged, self.before, strict=True):
            x.copy_(before.where(overflowed, x))
        self.overflowed = overflowed
        return allowed

    @contextmanager
    def lifted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for bound in self.bounds:
                stack.enter_context(bound.lifted())
            yield


def bounds_of(model: Transformer) -> list[RowBound]:
    bounds: list[RowBound] = []
    stash = stash_of(model)
    if stash is not None:
        bounds.append(stash)
    for dispatcher in symmetric_dispatchers(model):
        if dispatcher.room is not None:
            bounds.append(dispatcher)
    return bounds


def make_row_guard(
    model: Transformer, loss_scale: LossScale, judges: Iterable[StateProvider], world: World
) -> StepGuard:
    bounds = bounds_of(model)
    if not bounds:
        return NoBounds()
    judged = [loss_scale.all_finite]
    for judge in judges:
        judged += [x for _, x in judge.named_state() if isinstance(x, Tensor)]
    return RowGuard(bounds, judged, world)
