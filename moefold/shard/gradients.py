"""Gradients are sums: over microbatches, then over the ranks that saw other tokens, then divided once by the tokens.

There is no averaging and no factor that depends on the layout. Which ranks to sum over is read off the placement. Each
rank keeps the sum of its share of a bucket; during the last microbatch's backward a bucket starts travelling as soon as
its last gradient is there. Dividing and clipping are one factor, `scale`, which stays on the device and is applied by
whoever reads the sums: they are not written again.

    backward   ... layer 3 | layer 2 | layer 1 | layer 0
    network              bucket 0 ->|  bucket 1 ->|  bucket 2 ->
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.grad_reduce import PendingReduction, reduce_scatter_bf16, reduce_scatter_fp32
from moefold.comm.p2p import sum_over_members
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.layout.axes import World
from moefold.layout.gradient_sink import attach_gradient_sink
from moefold.shard.buckets import Bucket

GRADIENT_REDUCTIONS = {"fp32": reduce_scatter_fp32, "bf16": reduce_scatter_bf16}


class Gradients:
    def __init__(
        self,
        buckets: list[Bucket],
        world: World,
        travel: str = "fp32",
        add_squares: Callable[..., None] = add_squares,
    ):
        self.buckets, self.world, self.reduce, self.add_squares = (
            buckets,
            world,
            GRADIENT_REDUCTIONS[travel],
            add_squares,
        )
        self.scale = torch.ones((), dtype=torch.float64, device=world.device)
        self.last: Set[str] = set()  # parameters whose next gradient is the last of the step
        self.moved: set[str] = set()  # parameters that have had a gradient, as far as this rank's shares know
        self.missing: list[int] = []
        self.travelling: list[PendingReduction] = []
        self.hooks: list[RemovableHandle] = []
        for number, bucket in enumerate(buckets):
            for place, parameter in enumerate(bucket.parameters):
                attach_gradient_sink(
                    parameter.tensor,
                    partial(bucket.sums.lend_gradient_memory, place),
                    partial(bucket.sums.running_sum, place),
                )
                hook = self.accumulation_hook(number, place, parameter.name)
                self.hooks.append(parameter.tensor.register_post_accumulate_grad_hook(hook))
        self.number_of = {p.name: number for number, bucket in enumerate(buckets) for p in bucket.parameters}

    def remove_hooks(self) -> None:
        """Of the parameters, so that a run which is done with can be freed: Python does not see what hooks hold."""
        for hook in self.hooks:
            hook.remove()

    def begin(self) -> None:
        """Before the first microbatch."""
        self.last, self.travelling = set(), []
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.sums.release()

    def expect_last_gradients(self, names: Set[str]) -> None:
        """Before a backward that is the last to add to these parameters: what it finishes may leave."""
        self.last = names

    def mark_complete(self, names: Set[str]) -> None:
        """These parameters have all of their gradients."""
        self.last = set()
        for name in names:
            self.missing[self.number_of[name]] -= 1
        self.send_finished_buckets()

    def accumulation_hook(self, number: int, place: int, name: str):
        """A hook that adds a parameter's finished gradient to its place in a bucket and lets it go."""
        sums = self.buckets[number].sums

        def accumulate_gradient(tensor: torch.Tensor) -> None:
            added = sums.was_added_in_place(place)
            if tensor.grad is None and not added:  # it comes later, apart from the data gradient
                return
            if number < len(self.travelling):
                raise AssertionError(f"{name} got a gradient after its bucket had left; that sum would be wrong")
            if tensor.grad is not None:
                sums.add(place, tensor.grad)
                tensor.grad = None
            if name in self.last:
                self.missing[number] -= 1
                self.send_finished_buckets()

        return accumulate_gradient

    def send_finished_buckets(self) -> None:
        """Buckets leave in their fixed order, the same on every rank, whatever order they are finished in."""
        while len(self.travelling) < len(self.buckets) and self.missing[len(self.travelling)] <= 0:
            bucket = self.buckets[len(self.travelling)]
            self.travelling.append(self.reduce(bucket.gradients, bucket.replicas))

    def finish(self, tokens: torch.Tensor) -> None:
        """Wait for the sums over all ranks, to be divided by the number of tokens of the global batch."""
        self.missing = [0] * len(self.buckets)  # a parameter that took no part has the gradient zero
        self.send_finished_buckets()
        for bucket, reduction in zip(self.buckets, self.travelling, strict=True):
            bucket.sums.reduced = sum_over_members(reduction.arrived(), bucket.holders, self.world.axis("pipe"))
        self.scale = tokens.double().clamp(min=1).reciprocal()  # a batch may have nothing to learn from

    def gradient_shares(self) -> Iterator[torch.Tensor]:
        """This rank's share of the gradient in each bucket, as copies."""
        for bucket in self.buckets:
            total = bucket.reduced_gradient_share
            yield total.to(torch.promote_types(total.dtype, torch.float32)) * self.scale

    def note_moved(self) -> None:
        """Remember which parameters have a gradient that is not zero in this rank's shares. Waits for the device."""
        for bucket in self.buckets:
            share = bucket.reduced_gradient_share
            for parameter, first, last, at in bucket.pieces():
                if parameter.name not in self.moved and share[at : at + last - first].any():
                    self.moved.add(parameter.name)

    def norm(self) -> torch.Tensor:
        """The length of the whole gradient, dense and expert parameters together. Each element lies in the share of
        exactly one rank, but for copies on other pipeline ranks, which are left out; so one sum counts it once."""
        me = self.world.axis("pp").index
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        counted = [bucket for bucket in self.buckets if not bucket.holders or bucket.holders[0] == me]
        self.add_squares(total, *(bucket.reduced_gradient_share for bucket in counted))
        return all_reduce_no_grad(total, self.world.everyone).sqrt() * self.scale

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to `max_norm` if it is longer; returns the norm before that. If that is no finite
        number, the scale is none either, and the optimizer will touch nothing."""
        norm = self.norm()
        clipped = self.scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.scale = clipped.where(norm.isfinite(), torch.nan)
        return norm
