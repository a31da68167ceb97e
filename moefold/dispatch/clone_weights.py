"""Weights of clones: sent from the homes of hot experts to spare slots in forward, their gradients back in backward.

    forward    home's weights    -> spare slots     one all-to-all of all weights together
    backward   clones' gradients -> home            one all-to-all; the home adds them to its own gradient

Clones live for one microbatch, from dispatch to their backward. They are in no bucket, no optimizer state and no
checkpoint.

S spare slots of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all_no_grad
from moefold.layout.axes import Axis
from moefold.layout.gradient_sink import running_gradient_sum


class CloneFigures(NamedTuple):
    """Figures of a layer's clones, which add up over microbatches and ranks. `rows`: of the experts of all ranks.
    `filled`: the same if every rank had as many as the largest, and `filled_without` if nothing were cloned: over
    `rows`, they are the largest rank's rows over the mean. `bytes`: weights that this rank sent in forward."""

    filled: int = 0
    filled_without: int = 0
    rows: int = 0
    bytes: int = 0

    def plus(self, other: CloneFigures) -> CloneFigures:
        pairs = zip(self, other, strict=True)
        return CloneFigures(*map(sum, pairs))


class CloneMap(NamedTuple):
    """The clones of one microbatch, on the host. `homes`: for each rank, the positions (rank x held + slot) of the
    experts that it clones, ascending, which is the order of its spare slots. `first_row`: rows of this rank from here
    on are of clones. `figures`: without bytes, which the map does not know."""

    homes: list[list[int]]
    held: int
    slots: int
    first_row: int
    figures: CloneFigures

    def leaving_slots(self, rank: int) -> list[int]:
        """Slots of the experts that a rank sends, in the order of the receiving ranks."""
        leaving: list[int] = []
        for positions in self.homes:
            leaving += [position % self.held for position in positions if position // self.held == rank]
        return leaving

    def clones_between(self, home: int, host: int) -> int:
        """Experts of one rank that another one clones."""
        positions = self.homes[host]
        return sum(position // self.held == home for position in positions)


class CloneWeights(NamedTuple):
    """Weights of the experts in this rank's spare slots; slots without a clone are zero. `first_row`: rows from here on
    are theirs."""

    up: Tensor
    down: Tensor
    first_row: int


def send_clone_weights(clones: CloneMap, up: Tensor, down: Tensor, ep: Axis) -> CloneWeights:
    """The weights of this rank's clones. Every rank of ep calls this, whether it has clones or not."""
    up_S, down_S = SendClones.apply(clones, ep, up, down)  # pyright: ignore[reportGeneralTypeIssues]
    return CloneWeights(up_S, down_S, clones.first_row)


class SendClones(torch.autograd.Function):
    """Weights are kept as the tensors they are: the gradient sink is an attribute of the Parameter object."""

    @staticmethod
    def forward(ctx: Any, clones: CloneMap, ep: Axis, *weights: Tensor) -> Any:
        me = ep.index
        every_rank = range(ep.size)
        send = [clones.clones_between(me, other) for other in every_rank]
        receive = [clones.clones_between(other, me) for other in every_rank]
        ctx.leaving = clones.leaving_slots(me)
        ctx.way_back = (receive, send, ep)
        ctx.weights = weights
        packed = pack_experts(weights, ctx.leaving)
        arrived = all_to_all_no_grad(packed, send, receive, ep, what="clones")
        return unpack_experts(arrived, weights, clones.slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        receive, send, ep = ctx.way_back
        used = range(sum(receive))
        packed = pack_experts(gradients, used)
        returned = all_to_all_no_grad(packed, receive, send, ep, what="clone gradients")
        found = add_returned(returned, ctx.weights, ctx.leaving)
        return None, None, *found


def pack_experts(weights: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
    """A row for each slot: the expert's matrices, one behind the other."""
    width = sum(elements_of_expert(weight) for weight in weights)
    rows = len(slots)
    packed = weights[0].new_empty(rows, width)
    for row, slot in zip(packed, slots, strict=True):
        matrices = [weight[slot].flatten() for weight in weights]
        torch.cat(matrices, out=row)
    return packed


def unpack_experts(packed: Tensor, like: Sequence[Tensor], slots: int) -> tuple[Tensor, ...]:
    """The first experts of each weight's `slots` experts; the others are zero."""
    clones = len(packed)
    unpacked: list[Tensor] = []
    for part, weight in zip(split_by_weight(packed, like), like, strict=True):
        _, *sizes = weight.shape
        experts = weight.new_zeros(slots, *sizes)
        experts[:clones] = part.view(clones, *sizes)
        unpacked.append(experts)
    return tuple(unpacked)


def add_returned(returned: Tensor, weights: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor | None]:
    """The gradients of clones as gradients of their homes' weights; None where there are none, or where they were added
    to the sum in the weight's sink."""
    if not slots:
        return [None for _ in weights]
    gradients: list[Tensor | None] = []
    for part, weight in zip(split_by_weight(returned, weights), weights, strict=True):
        running = running_gradient_sum(weight)
        total = torch.zeros_like(weight) if running is None else running
        for slot, gradient in zip(slots, part, strict=True):  # one after the other: the same sum in every run
            expert = total[slot]
            expert += gradient.view(expert.shape)
        gradients.append(total if running is None else None)
    return gradients


def split_by_weight(packed: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    widths = [elements_of_expert(weight) for weight in weights]
    return packed.split(widths, dim=1)


def elements_of_expert(weight: Tensor) -> int:
    _, *sizes = weight.shape
    return prod(sizes)


def expert_bytes(weights: Sequence[Tensor]) -> int:
    """Bytes of one expert."""
    return sum(elements_of_expert(weight) * weight.element_size() for weight in weights)
