"""Gradients as sums: over microbatches, then over the ranks that saw other tokens, then divided once by the tokens.

There is no averaging and no factor that depends on the layout. The ranks to sum over are read off the placement. Each
rank keeps the sum of its share of a bucket; during the last microbatch's backward the reduce-scatter of a bucket starts
as soon as its last gradient is complete. Dividing and clipping are one factor, the unit's `scale`, which stays on the
device and is applied by whatever reads the sums: they are not written again.

    backward   ... layer 3 | layer 2 | layer 1 | layer 0
    network              bucket 0 ->|  bucket 1 ->|  bucket 2 ->
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.grad_reduce import PendingReduction, reduce_scatter_bf16, reduce_scatter_fp32
from moefold.comm.p2p import sum_over_members
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.layout.axes import World
from moefold.layout.gradient_sink import attach_gradient_sink
from moefold.shard.buckets import Bucket, units_of_buckets

GRADIENT_REDUCTIONS = {"fp32": reduce_scatter_fp32, "bf16": reduce_scatter_bf16}
AccumulationHook = Callable[[Tensor], None]


class Gradients:
    """The gradients of a model in buckets. `reduction`: the dtype of the reduce-scatter between ranks."""

    def __init__(
        self,
        buckets: list[Bucket],
        world: World,
        reduction: str = "fp32",
        add_squares: Callable[..., None] = add_squares,
    ):
        self.buckets = buckets
        self.world = world
        self.reduce = GRADIENT_REDUCTIONS[reduction]
        self.add_squares = add_squares
        self.units = units_of_buckets(buckets)
        one = torch.ones((), dtype=torch.float64, device=world.device)
        self.scales = dict.fromkeys(self.units, one)  # of each unit: what its sums are multiplied by when read
        # What this step has seen so far
        self.last: Set[str] = set()  # parameters whose next gradient is the last of the step
        self.moved: set[str] = set()  # parameters of which this rank's shares have seen a non-zero gradient
        self.missing: list[int] = []  # of each bucket: parameters whose gradients are incomplete
        self.reductions: list[PendingReduction] = []  # of the first buckets, in their order
        # Parameters by name: the number of their bucket
        self.number_of: dict[str, int] = {}
        self.hooks: list[RemovableHandle] = []
        for number, bucket in enumerate(buckets):
            self.attach_bucket(number, bucket)

    def attach_bucket(self, number: int, bucket: Bucket) -> None:
        """Let backward write and add the gradients of these parameters to the bucket."""
        sums = bucket.sums
        for place, parameter in enumerate(bucket.parameters):
            lend = partial(sums.lend_gradient_memory, place)
            running = partial(sums.running_sum, place)
            attach_gradient_sink(parameter.tensor, lend, running)
            hook = self.accumulation_hook(number, place, parameter.name)
            handle = parameter.tensor.register_post_accumulate_grad_hook(hook)
            self.hooks.append(handle)
            self.number_of[parameter.name] = number

    def remove_hooks(self) -> None:
        """Remove the hooks of the parameters, so that a finished run can be freed: Python's collector does not see the
        references that hooks hold."""
        for hook in self.hooks:
            hook.remove()

    def begin(self) -> None:
        """Forget the step before; to be called before the first microbatch."""
        self.last = set()
        self.reductions = []
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.sums.release()

    def expect_last_gradients(self, names: Set[str]) -> None:
        """Announce a backward that is the last to add to these parameters: buckets it completes may be reduced."""
        self.last = names

    def mark_complete(self, names: Set[str]) -> None:
        """Declare that these parameters have all of their gradients."""
        self.last = set()
        for name in names:
            number = self.number_of[name]
            self.missing[number] -= 1
        self.reduce_complete_buckets()

    def accumulation_hook(self, number: int, place: int, name: str) -> AccumulationHook:
        """A hook that adds a parameter's gradient to its place in a bucket and frees it."""
        sums = self.buckets[number].sums

        def accumulate_gradient(tensor: Tensor) -> None:
            added = sums.was_added_in_place(place)
            if tensor.grad is None and not added:  # a deferred weight gradient: the hook runs again for it
                return
            # The bucket's reduction has read the sums already.
            if number < len(self.reductions):
                raise AssertionError(f"{name} got a gradient after its bucket had left; that sum would be wrong")
            if tensor.grad is not None:
                sums.add(place, tensor.grad)
                tensor.grad = None
            if name in self.last:
                self.missing[number] -= 1
                self.reduce_complete_buckets()

        return accumulate_gradient

    def reduce_complete_buckets(self) -> None:
        """Start the reductions of complete buckets. Buckets leave in their fixed order, the same on every rank,
        whatever order they are completed in."""
        while len(self.reductions) < len(self.buckets):
            number = len(self.reductions)
            if self.missing[number] > 0:
                return
            bucket = self.buckets[number]
            reduction = self.reduce(bucket.gradients, bucket.replicas, bucket.sums.memory_for_reduction)
            self.reductions.append(reduction)

    def finish(self, tokens: Tensor) -> None:
        """Wait for the sums over all ranks, to be divided by the number of tokens of the global batch."""
        self.complete_all()
        for unit in self.units:
            self.await_unit(unit)
        self.divide_by(tokens)

    def complete_all(self) -> None:
        """Reduce all buckets: a parameter that took no part in the step has the gradient zero."""
        self.missing = [0] * len(self.buckets)
        self.reduce_complete_buckets()

    def await_unit(self, unit: str) -> None:
        """Wait for the sums of a unit over all ranks."""
        pipe = self.world.axis("pipe")
        for number, bucket in enumerate(self.buckets):
            if bucket.unit == unit:
                arrived = self.reductions[number].arrived()
                bucket.sums.reduced = sum_over_members(arrived, bucket.holders, pipe)

    def divide_by(self, tokens: Tensor) -> None:
        """Set the scale of all units to one over the tokens; a batch may have no label at all."""
        count = tokens.double().clamp(min=1)
        scale = count.reciprocal()
        self.scales = dict.fromkeys(self.units, scale)

    def invalidate_unless(self, finite: Tensor) -> None:
        """Make every scale NaN where a flag on the device is false: an optimizer then updates nothing."""
        for unit, scale in self.scales.items():
            self.scales[unit] = scale.where(finite, torch.nan)

    def gradient_shares(self) -> Iterator[Tensor]:
        """This rank's share of the gradient in each bucket, as copies."""
        for bucket in self.buckets:
            total = bucket.reduced_gradient_share
            wide = torch.promote_types(total.dtype, torch.float32)
            yield total.to(wide) * self.scales[bucket.unit]

    def note_moved(self) -> None:
        """Remember which parameters have a non-zero gradient in this rank's shares. Waits for the device."""
        for bucket in self.buckets:
            share = bucket.reduced_gradient_share
            for piece in bucket.pieces():
                name = piece.parameter.name
                gradient = share[piece.window]
                if name not in self.moved and gradient.any():
                    self.moved.add(name)

    def norm(self, units: Collection[str] | None = None) -> Tensor:
        """The norm of the gradient, dense and expert parameters together, of some units or of all. Each element lies in
        the share of exactly one rank; of copies on several pipeline ranks one is counted."""
        units = self.units if units is None else units
        device = self.world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        counted = [bucket for bucket in self.buckets if self.counts_in_norm(bucket, units)]
        shares = [bucket.reduced_gradient_share for bucket in counted]
        self.add_squares(total, *shares)
        total = all_reduce_no_grad(total, self.world.everyone)
        return total.sqrt() * self.common_scale(units)

    def common_scale(self, units: Collection[str]) -> Tensor:
        """The scale of units that are measured together, which is the same for all of them."""
        first_unit = next(iter(units))
        return self.scales[first_unit]

    def counts_in_norm(self, bucket: Bucket, units: Collection[str]) -> bool:
        if bucket.unit not in units:
            return False
        if not bucket.holders:
            return True
        first_holder = bucket.holders[0]
        return first_holder == self.world.axis("pp").index

    def clip(self, max_norm: float, units: Collection[str] | None = None) -> Tensor:
        """Scale the gradient of some units, or of all, down to `max_norm` if its norm is larger; returns the norm
        before. If the norm is not finite, the scale becomes NaN, and an optimizer updates nothing."""
        units = self.units if units is None else units
        norm = self.norm(units)
        ratio = max_norm / (norm + 1e-6)
        unclipped = self.common_scale(units)
        clipped = unclipped * ratio.clamp(max=1.0)
        finite = norm.isfinite()
        scale = clipped.where(finite, torch.nan)
        self.scales |= dict.fromkeys(units, scale)
        return norm
