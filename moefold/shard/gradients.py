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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.grad_reduce import PendingReduction, reduce_scatter_bf16, reduce_scatter_fp32, wait_for_nothing
from moefold.comm.p2p import sum_over_members
from moefold.comm.two_levels import Reduction, reduce_over_levels
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.payload_ops import REFERENCES, PayloadOps
from moefold.layout.axes import World
from moefold.layout.gradient_sink import attach_gradient_sink
from moefold.precision.fp8_gradient_sum import reduce_scatter_fp8
from moefold.shard.block_values import FlatValues, decoded, decoded_in_parts, whole_values
from moefold.shard.buckets import Bucket, units_of_buckets
from moefold.shard.gradient_sums import ParameterSum

FIRST_STEPS = 3  # after which every parameter should have had a gradient
POWER_OF_TWO_SCALES = ScaleRule(power_of_two=True)
GRADIENT_REDUCTIONS: dict[str, Reduction] = {
    "fp32": reduce_scatter_fp32,
    "bf16": reduce_scatter_bf16,
    "fp8": reduce_scatter_fp8,
    "fp8 by powers of two": partial(reduce_scatter_fp8, rule=POWER_OF_TWO_SCALES),
}
FP8_REDUCTIONS = ("fp8", "fp8 by powers of two")
AccumulationHook = Callable[[Tensor], None]
AfterReduction = Callable[[Bucket], None]
SumReader = Callable[[str, Tensor], None]  # called with a parameter's name and its flat sum
UnitNames = Collection[str]


def note_nothing(_: Bucket) -> None: ...


def nothing_left() -> Tensor:
    raise AssertionError("these gradients were freed")


NOTHING_TO_AWAIT = PendingReduction(wait_for_nothing, nothing_left)


def device_number(value: float, device: torch.device) -> Tensor:
    """A number in fp64 on the device."""
    return torch.full((), value, dtype=torch.float64, device=device)


class HeldMemory(NamedTuple):
    """The flat gradient memory of a bucket, and this rank's share of the sum over ranks."""

    flat: Tensor | None
    reduced: FlatValues | None


class HeldGradients(NamedTuple):
    """The gradients of a finished step: the scale of each unit, the memory of each bucket."""

    scales: dict[str, Tensor]
    memory: list[HeldMemory]


class Gradients:
    """The gradients of a model in buckets. `reduction`: a name of GRADIENT_REDUCTIONS, as what gradients are sent."""

    def __init__(
        self,
        buckets: list[Bucket],
        world: World,
        reduction: str = "fp32",
        add_squares: Callable[..., None] = add_squares,
        payloads: PayloadOps = REFERENCES,
    ):
        self.buckets = buckets
        self.world = world
        reduce = GRADIENT_REDUCTIONS[reduction]
        if reduction in FP8_REDUCTIONS:
            reduce = partial(reduce, payloads=payloads)
        self.reduce = partial(reduce_over_levels, reduce)
        self.add_squares = add_squares
        self.units = units_of_buckets(buckets)
        one = device_number(1.0, world.device)
        self.scales = dict.fromkeys(self.units, one)  # of each unit: what its sums are multiplied by when read
        # What this step has seen so far
        self.last: Set[str] = set()  # parameters whose next gradient is the last of the step
        self.moved: set[str] = set()  # parameters of which this rank's shares have seen a non-zero gradient
        self.missing: list[int] = []  # of each bucket: parameters whose gradients are incomplete
        self.reductions: list[PendingReduction] = []  # of the first buckets, in their order
        self.after_reduction: AfterReduction = note_nothing  # called when a bucket's reduction has started
        self.sum_readers: list[SumReader] = []  # called when a gradient has been added to this rank's sum
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
            total = ParameterSum(sums, place)
            attach_gradient_sink(parameter.tensor, lend, running, total)
            name = parameter.name
            hook = self.accumulation_hook(number, place, name)
            handle = parameter.tensor.register_post_accumulate_grad_hook(hook)
            self.hooks.append(handle)
            self.number_of[name] = number

    def remove_hooks(self) -> None:
        """Remove the hooks of the parameters, so that a finished run can be freed: Python's collector does not see the
        references that hooks hold."""
        for hook in self.hooks:
            hook.remove()

    def stay_in_place(self) -> None:
        """From now on, sums have the same memory in every step, as captured graphs need."""
        for bucket in self.buckets:
            bucket.sums.stay_in_place()

    def begin(self) -> None:
        """Forget the step before; to be called before the first microbatch."""
        self.last = set()
        self.reductions = []
        self.missing = []
        for bucket in self.buckets:
            parameters = len(bucket.parameters)
            self.missing.append(parameters)
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
            for read_sum in self.sum_readers:
                total = sums.place(place)
                read_sum(name, total)
                sums.keep(place, total)
            self.note_gradient(number, name)

        return accumulate_gradient

    def note_gradient(self, number: int, name: str) -> None:
        """A gradient has been added to its sum."""
        if name in self.last:
            self.missing[number] -= 1
            self.reduce_complete_buckets()

    def end_deferred_gradients(self, stage: int) -> None:
        """Deferred weight gradients of a stage have been added; nothing is to be done where sums wait for the last
        microbatch."""

    def reduce_complete_buckets(self) -> None:
        """Start the reductions of complete buckets. Buckets leave in their fixed order, the same on every rank,
        whatever order they are completed in."""
        while len(self.reductions) < len(self.buckets):
            number = len(self.reductions)
            if self.missing[number] > 0:
                return
            bucket = self.buckets[number]
            reduction = NOTHING_TO_AWAIT
            if not bucket.replicas.is_alone:
                allocate = bucket.sums.memory_for_reduction
                reduction = self.reduce(bucket.gradients, bucket.replicas, allocate)
            self.reductions.append(reduction)
            self.after_reduction(bucket)

    def finish(self, tokens: Tensor) -> None:
        """Wait for the sums over all ranks, to be divided by the number of tokens of the global batch."""
        self.complete_all()
        for unit in self.units:
            self.await_unit(unit)
        self.divide_by(tokens)

    def complete_all(self) -> None:
        """Reduce all buckets: a parameter that took no part in the step has the gradient zero."""
        buckets = len(self.buckets)
        self.missing = [0] * buckets
        self.reduce_complete_buckets()

    def await_unit(self, unit: str) -> None:
        """Wait for the sums of a unit over all ranks."""
        for number, bucket in enumerate(self.buckets):
            if bucket.unit == unit:
                total = bucket.sums.values()
                if not bucket.replicas.is_alone:
                    total = self.reductions[number].arrived()
                total = self.sum_over_copies(bucket, total)
                bucket.sums.reduced = total

    def sum_over_copies(self, bucket: Bucket, reduced: FlatValues) -> FlatValues:
        """The sum of a reduced share over the ranks that hold the same share, in this pipeline stage and in others."""
        if bucket.copies.is_alone and not bucket.holders:
            return reduced
        total = all_reduce_no_grad(decoded(reduced), bucket.copies)
        pipe = self.world.axis("pipe")
        return sum_over_members(total, bucket.holders, pipe)

    def release_unit(self, unit: str) -> None:
        """Free the gradients of a unit whose sums have been used."""
        for number, bucket in enumerate(self.buckets):
            if bucket.unit == unit:
                self.reductions[number] = NOTHING_TO_AWAIT
                bucket.await_update()  # which reads them
                bucket.sums.release()

    def held_bytes(self) -> int:
        """Memory of gradients at this moment."""
        held = 0
        for bucket in self.buckets:
            held += bucket.sums.held_bytes
        return held

    def divide_by(self, tokens: Tensor) -> None:
        """Set the scale of all units to one over the tokens; a batch may have no label at all."""
        count = tokens.double()
        has_labels = count > 0
        at_least_one = count.where(has_labels, 1)
        scale = at_least_one.reciprocal()
        self.scales = dict.fromkeys(self.units, scale)

    def invalidate_unless(self, finite: Tensor) -> None:
        """Make every scale NaN where a flag on the device is false: an optimizer then updates nothing."""
        for unit in self.units:
            scale = self.scales[unit]
            self.scales[unit] = scale.where(finite, torch.nan)

    def bytes(self) -> int:
        """Memory of the sums of all buckets."""
        total = 0
        for bucket in self.buckets:
            total += bucket.sums.nbytes
        return total

    def held(self) -> HeldGradients:
        memory: list[HeldMemory] = []
        for bucket in self.buckets:
            sums = bucket.sums
            held = HeldMemory(sums.flat, sums.reduced)
            memory.append(held)
        scales = dict(self.scales)
        return HeldGradients(scales, memory)

    def restore(self, held: HeldGradients) -> None:
        """Make these the gradients of the last step: those of a captured step, which a replay has written again."""
        self.scales = dict(held.scales)
        for bucket, memory in zip(self.buckets, held.memory, strict=True):
            bucket.sums.flat = memory.flat
            bucket.sums.reduced = memory.reduced

    def gradient_shares(self) -> Iterator[Tensor]:
        """This rank's share of the gradient in each bucket, as copies."""
        for bucket in self.buckets:
            total = whole_values(bucket.reduced_gradient_share)
            scale = self.scales[bucket.unit]
            yield total * scale

    def note_moved(self, units: UnitNames | None = None) -> None:
        """Remember which parameters have a non-zero gradient in this rank's shares, of some units or of all. Waits for
        the device."""
        units = self.units if units is None else units
        for bucket in self.buckets:
            if bucket.unit not in units:
                continue
            share = bucket.reduced_gradient_share
            for piece in bucket.pieces():
                name = piece.parameter.name
                gradient = share[piece.window]
                if name in self.moved:
                    continue
                if gradient.any():
                    self.moved.add(name)

    def norm(self, units: UnitNames | None = None) -> Tensor:
        """The norm of the gradient, dense and expert parameters together, of some units or of all. Each element lies in
        the share of exactly one rank; of copies on several pipeline ranks one is counted."""
        units = self.units if units is None else units
        squares = device_number(0.0, self.world.device)
        shares: list[Tensor] = []
        for bucket in self.buckets:
            if not self.counts_in_norm(bucket, units):
                continue
            share = bucket.reduced_gradient_share
            if isinstance(share, Tensor):
                shares.append(share)
                continue
            for part in decoded_in_parts(share):
                self.add_squares(squares, part)
        self.add_squares(squares, *shares)
        everyone = self.world.everyone
        total = all_reduce_no_grad(squares, everyone)
        unscaled = total.sqrt()
        return unscaled * self.common_scale(units)

    def common_scale(self, units: UnitNames) -> Tensor:
        """The scale of units that are measured together, which is the same for all of them."""
        first_unit = next(iter(units))
        return self.scales[first_unit]

    def counts_in_norm(self, bucket: Bucket, units: UnitNames) -> bool:
        is_first_copy = bucket.copies.index == 0
        if bucket.unit not in units or not is_first_copy:
            return False
        if not bucket.holders:
            return True
        pp = self.world.axis("pp")
        first_holder = bucket.holders[0]
        return first_holder == pp.index

    def clip(self, max_norm: float, units: UnitNames | None = None) -> Tensor:
        """Scale the gradient of some units, or of all, down to `max_norm` if its norm is larger; returns the norm
        before. If the norm is not finite, the scale becomes NaN, and an optimizer updates nothing."""
        units = self.units if units is None else units
        norm = self.norm(units)
        self.scale_down(max_norm, norm, norm, units)
        return norm

    def scale_down(self, max_norm: float, norm: Tensor, measure: Tensor, units: UnitNames) -> None:
        """Scale the gradient of units with this norm as if their norm were `measure`."""
        ratio = max_norm / (measure + 1e-6)
        at_most_one = ratio.clamp(max=1.0)
        unclipped = self.common_scale(units)
        clipped = unclipped * at_most_one
        finite = norm.isfinite()
        scale = clipped.where(finite, torch.nan)
        self.scales |= dict.fromkeys(units, scale)
