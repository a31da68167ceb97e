"""The time of updates: after backward, or inside it, a unit as soon as its gradients are complete.

    after backward      backward of all layers | sums over ranks | norm | update of all units
    inside backward     backward of layer 3 | update 3 | backward of layer 2 | update 2 | ...

Inside backward the gradients of a unit are freed once it is updated, so that those of one unit exist at a time, of two
where ranks sum them while the next layer's backward runs. With several microbatches only the last one's backward
completes gradients. A unit whose gradient is not finite is not updated, and named in the report of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moefold.optim.optimizer import Optimizer
from moefold.shard.buckets import Bucket
from moefold.shard.clipping import ClippingPolicy
from moefold.shard.gradients import FIRST_STEPS, Gradients

Wait = Callable[[], None]


class UpdateTimes(Protocol):
    def begin_step(self, step: int, tokens: Tensor, all_finite: Tensor, wait: Wait) -> None:
        """Called before the first microbatch, once the optimizer has the numbers of the step. `tokens`: what gradients
        are divided by. `wait`: for readers of the weights, before the first update."""
        ...

    def await_gradients(self) -> None:
        """Wait for the sums over ranks."""
        ...

    def clip_gradients(self) -> Tensor:
        """The norm of all gradients before clipping."""
        ...

    def update_rest(self, updates: Tensor) -> None:
        """Update what backward did not, where the step may update anything."""
        ...

    def note_moved(self) -> None:
        """Remember which parameters have had a gradient in this step."""
        ...

    def unit_norms(self) -> dict[str, Tensor]:
        """The norms of units that were updated, or left out, by themselves in this step."""
        ...


class UpdateAfterBackward:
    def __init__(self, gradients: Gradients, clipping: ClippingPolicy, optimizer: Optimizer):
        self.gradients = gradients
        self.clipping = clipping
        self.optimizer = optimizer

    def begin_step(self, step: int, tokens: Tensor, all_finite: Tensor, wait: Wait) -> None:
        self.tokens = tokens
        self.wait = wait

    def await_gradients(self) -> None:
        self.gradients.finish(self.tokens)

    def clip_gradients(self) -> Tensor:
        gradients = self.gradients
        norm = self.clipping.clip_units(gradients, gradients.units)
        self.clipping.end_step(norm)
        return norm

    def update_rest(self, updates: Tensor) -> None:
        self.gradients.invalidate_unless(updates)  # a NaN factor updates nothing
        self.wait()
        self.optimizer.update_all(self.gradients.scales)

    def note_moved(self) -> None:
        self.gradients.note_moved()

    def unit_norms(self) -> dict[str, Tensor]:
        return {}


class UpdateInBackward:
    def __init__(self, gradients: Gradients, clipping: ClippingPolicy, optimizer: Optimizer):
        self.gradients = gradients
        self.clipping = clipping
        self.optimizer = optimizer
        buckets = gradients.buckets
        self.buckets_of = Counter(bucket.unit for bucket in buckets)
        has_replicas = any(bucket.replicas.size > 1 for bucket in buckets)
        self.most_waiting = 1 if has_replicas else 0  # units whose sums are under way while backward goes on
        gradients.after_reduction = self.note_reduction
        self.is_open = False

    def begin_step(self, step: int, tokens: Tensor, all_finite: Tensor, wait: Wait) -> None:
        wait()
        self.step = step
        self.gradients.divide_by(tokens)
        self.gradients.invalidate_unless(all_finite)
        self.missing = dict(self.buckets_of)
        self.waiting: list[str] = []
        self.norms: dict[str, Tensor] = {}
        self.is_open = True

    def note_reduction(self, bucket: Bucket) -> None:
        """Update units that are complete. Buckets leave in one order, and so units are updated in one order on every
        rank."""
        if not self.is_open:
            return
        unit = bucket.unit
        self.missing[unit] -= 1
        if self.missing[unit] == 0:
            self.waiting.append(unit)
            self.update_units(self.most_waiting)

    @torch.no_grad()
    def update_units(self, left: int) -> None:
        """Update the units that wait, but for the last few."""
        while len(self.waiting) > left:
            first = self.waiting.pop(0)
            self.update_unit(first)

    def update_unit(self, unit: str) -> None:
        gradients = self.gradients
        gradients.await_unit(unit)
        self.norms[unit] = self.clipping.clip_units(gradients, [unit])
        scale = gradients.scales[unit]
        self.optimizer.update(unit, scale)
        if self.step <= FIRST_STEPS:
            gradients.note_moved([unit])
        gradients.release_unit(unit)

    def await_gradients(self) -> None:
        self.gradients.complete_all()
        self.update_units(0)
        self.is_open = False

    def clip_gradients(self) -> Tensor:
        norms = list(self.norms.values())
        norms_U = torch.stack(norms)
        norm = norms_U.norm()
        self.clipping.end_step(norm)
        return norm

    def update_rest(self, updates: Tensor) -> None: ...

    def note_moved(self) -> None: ...  # before gradients are freed

    def unit_norms(self) -> dict[str, Tensor]:
        return self.norms


def make_update_times(
    when: str, gradients: Gradients, clipping: ClippingPolicy, optimizer: Optimizer
) -> UpdateTimes:  # fmt: skip
    """The time of updates of a value of `optim.when`."""
    make = UpdateInBackward if when == "backward" else UpdateAfterBackward
    return make(gradients, clipping, optimizer)
