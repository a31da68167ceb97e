"""Stash guard: a step in which rows of experts found no room changes nothing, and is run again without the stash.

    on the device    flag of any rank -> no update, and what the step has judged by (loss scale, spikes, clipping) is as
                     before it
    on the host      reads the flag behind the step, and computes the step again on the same batch; rows then lie in
                     tensors of their own

Forward does not depend on the stash: router counts and losses are those of the step, gradients alone are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from moefold.checkpoint.live.logical_tensors import StateProvider
from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.layout.axes import World
from moefold.memory.stash import RowStash, stash_of
from moefold.model.transformer import Transformer
from moefold.optim.loss_scale import LossScale

Tensors = Sequence[Tensor]


class StepGuard(Protocol):
    overflowed: Tensor | None  # whether rows of any rank found no room in the last step
    repeated_steps: int  # since the start

    def begin_step(self) -> None: ...

    def allow(self, updates: Tensor) -> Tensor:
        """Whether the step may update anything, once it is judged."""
        ...

    def without_stash(self) -> AbstractContextManager[None]:
        """Rows of a step that is run again lie in tensors of their own."""
        ...


class NoStash:
    """Rows lie in tensors of their own: there is room, or the run ends."""

    overflowed: Tensor | None = None
    repeated_steps = 0

    def begin_step(self) -> None: ...

    def allow(self, updates: Tensor) -> Tensor:
        return updates

    def without_stash(self) -> AbstractContextManager[None]:
        return nullcontext()


class StashGuard:
    """`judged`: tensors that a step writes whether or not it updates anything."""

    def __init__(self, stash: RowStash, judged: Tensors, world: World):
        self.stash = stash
        self.judged = list(judged)
        self.everyone = world.everyone
        self.before: list[Tensor] = []
        self.overflowed: Tensor | None = None
        self.repeated_steps = 0

    def begin_step(self) -> None:
        self.stash.begin_step()
        self.before = [x.clone() for x in self.judged]

    @torch.no_grad()
    def allow(self, updates: Tensor) -> Tensor:
        own = self.stash.overflowed()
        flag = all_reduce_max_no_grad(own.int(), self.everyone)
        overflowed = flag > 0
        allowed = updates & ~overflowed
        for x, before in zip(self.judged, self.before, strict=True):
            x.copy_(before.where(overflowed, x))
        self.overflowed = overflowed
        return allowed

    def without_stash(self) -> AbstractContextManager[None]:
        return self.stash.closed()


def make_stash_guard(
    model: Transformer, loss_scale: LossScale, judges: Iterable[StateProvider], world: World
) -> StepGuard:
    stash = stash_of(model)
    if stash is None:
        return NoStash()
    judged = [loss_scale.all_finite]
    for judge in judges:
        judged += [x for _, x in judge.named_state() if isinstance(x, Tensor)]
    return StashGuard(stash, judged, world)
