"""Gradients of fully sharded units: each is reduced as soon as backward has left its unit, in every microbatch.

    backward   ... unit 3 | unit 2 | unit 1 | unit 0
    network            unit 3 ->| unit 2 ->| unit 1 ->        sums over ranks add up in this rank's shares

So a rank has the whole gradients of the unit in backward and of those on their way, and shares of all others. Deferred
weight gradients are reduced when they have been computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.grad_reduce import PendingReduction
from moefold.kernels.quantise.payload_ops import REFERENCES, PayloadOps
from moefold.layout.axes import World
from moefold.layout.deferred_wgrad import OPEN_QUEUES
from moefold.observe.trace import SpanRecorder
from moefold.shard.block_values import decoded
from moefold.shard.buckets import Bucket
from moefold.shard.gradients import Gradients

UnitsOfStage = Mapping[int, Set[str]]


class UnitReduction(NamedTuple):
    """A reduction of one bucket under way, and when it was begun. What it sends is kept until it is complete."""

    bucket: Bucket
    reduction: PendingReduction
    sent: Tensor
    begun: float


class UnitGradients(Gradients):
    """The gradients of a model whose buckets follow units. `stages`: the units that each stage of this rank uses."""

    def __init__(
        self,
        buckets: list[Bucket],
        world: World,
        reduction: str,
        add_squares: Callable[..., None],
        stages: UnitsOfStage,
        spans: SpanRecorder,
        payloads: PayloadOps = REFERENCES,
    ):
        super().__init__(buckets, world, reduction, add_squares, payloads)
        self.stages = stages
        self.spans = spans
        self.under_way: list[UnitReduction] = []
        self.entered: Set[str] = set()  # units whose gradients are to be reduced when backward has left them

    def begin(self) -> None:
        super().begin()
        self.under_way = []
        self.entered = set()

    def note_gradient(self, number: int, name: str) -> None:
        """Units are reduced when backward leaves them, whichever of their gradients is the last."""

    def mark_complete(self, names: Set[str]) -> None: ...

    def enter_units(self, units: Set[str]) -> None:
        """Backward comes to steps of these units, and has left all others."""
        left = self.entered - units
        self.leave_units(left)
        if not OPEN_QUEUES:  # deferred gradients are not complete when backward leaves
            self.entered = units

    def leave_units(self, units: Set[str]) -> None:
        for unit in sorted(units):
            self.reduce_unit(unit)
        self.entered = self.entered - units

    def end_deferred_gradients(self, stage: int) -> None:
        units = self.stages[stage]
        for unit in self.units:
            if unit in units:
                self.reduce_unit(unit)

    def reduce_unit(self, unit: str) -> None:
        """Start the reductions of a unit's sums; reductions of units before it are awaited. A gradient that autograd
        delivers with that of another use is reduced when backward has left that use (a tied embedding)."""
        self.settle()
        for bucket in self.buckets:
            if bucket.unit == unit and not bucket.sums.is_awaited:
                begun = time.time()
                sent = bucket.sums.take()
                allocate = bucket.sums.memory_for_reduction
                reduction = self.reduce(sent, bucket.replicas, allocate)
                under_way = UnitReduction(bucket, reduction, sent, begun)
                self.under_way.append(under_way)

    def settle(self) -> None:
        """Add what has arrived to this rank's shares."""
        for bucket, reduction, _, begun in self.under_way:
            arrived = reduction.arrived()
            if self.spans.recording:
                self.spans.add_span(bucket.unit, "reductions", begun)
            total = bucket.sums.reduced
            if total is None:
                bucket.sums.reduced = arrived
            else:
                decoded(total).add_(arrived)
        self.under_way = []

    def bytes(self) -> int:
        """Memory of this rank's shares, without whole gradients of units in backward."""
        total = 0
        for bucket in self.buckets:
            total += bucket.sums.nbytes // bucket.replicas.size
        return total

    def finish(self, tokens: Tensor) -> None:
        """Wait for the sums over all ranks, to be divided by the number of tokens of the global batch. A parameter that
        took no part in the step has the gradient zero."""
        self.leave_units(self.entered)
        self.settle()
        for bucket in self.buckets:
            sums = bucket.sums
            assert not sums.filled, f"a gradient of {bucket.unit} came after its unit had been left"
            if sums.reduced is None:
                share = bucket.share
                size = share.stop - share.start
                dtype = torch.promote_types(sums.dtype, torch.float32)
                sums.reduced = torch.zeros(size, dtype=dtype, device=sums.device)
            sums.reduced = self.sum_over_copies(bucket, sums.reduced)
        self.divide_by(tokens)
