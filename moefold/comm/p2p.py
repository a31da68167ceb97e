"""Point-to-point sends and receives between pipeline ranks, and sums over some of them.

Messages from one rank to another arrive in the order in which they were sent. A receiver follows the sender's program,
so messages need no tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import byte_counters
from moefold.comm.blocked_times import blocked
from moefold.layout.axes import Axis
from moefold.watch.position import note_collective


def staged_through_host(x: Tensor, axis: Axis) -> Tensor:
    """x, or a copy of it on the host where gloo, which sends host memory only, serves ranks that share a GPU."""
    if not x.is_cuda or axis.is_alone:
        return x
    if dist.get_backend(axis.group) != "gloo":
        return x
    return x.cpu()


@dataclass
class PendingReceive:
    """A receive in progress; `device` is where the tensor is wanted."""

    work: Any
    tensor: Tensor
    device: torch.device

    def arrived(self) -> Tensor:
        with blocked():
            self.work.wait()
        return self.tensor.to(self.device)


@dataclass
class PipelineChannel:
    """Messages between the ranks of a pipeline. A tensor that is sent is kept alive until it has left."""

    axis: Axis
    pending_sends: list[tuple[Any, Tensor]] = field(default_factory=list)

    def send(self, x: Tensor, to: int) -> None:
        byte_counters.note_bytes_sent("pipe", self.axis, x.nbytes)
        self.forget_completed_sends()
        x = staged_through_host(x, self.axis)
        receiver = self.axis.ranks[to]
        group = self.axis.group
        work = dist.isend(x, receiver, group=group)
        pending = work, x
        self.pending_sends.append(pending)

    def forget_completed_sends(self) -> None:
        pending = []
        for work, kept in self.pending_sends:
            if not work.is_completed():
                pending.append((work, kept))
        self.pending_sends = pending

    def receive(self, like: Tensor, source: int) -> PendingReceive:
        """`like` is the memory to receive into."""
        note_collective("pipe receive", self.axis.name)
        buffer = staged_through_host(like, self.axis)
        sender = self.axis.ranks[source]
        group = self.axis.group
        work = dist.irecv(buffer, sender, group=group)
        return PendingReceive(work, buffer, like.device)

    def flush(self) -> None:
        """Wait until every message has left."""
        with blocked():
            for work, _ in self.pending_sends:
                work.wait()
        self.pending_sends = []


def sum_over_members(x: Tensor, members: Sequence[int], axis: Axis) -> Tensor:
    """The sum over some of the axis' ranks, on each of them, added in the order of ranks: the same bits on all."""
    if axis.index not in members or len(members) == 1:
        return x
    pipe = PipelineChannel(axis)
    others = [member for member in members if member != axis.index]
    arriving: dict[int, PendingReceive] = {}
    for member in others:
        memory = torch.empty_like(x)
        arriving[member] = pipe.receive(memory, member)
    for member in others:
        pipe.send(x, member)
    parts: dict[int, Tensor] = {}
    for member, pending in arriving.items():
        parts[member] = pending.arrived()
    parts[axis.index] = x
    first, *rest = members
    total = parts[first].clone()
    for member in rest:
        total += parts[member]
    pipe.flush()
    return total
