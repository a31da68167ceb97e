"""Asynchronous reduce-scatter of gradients: each rank keeps its part of the sum, and waits when the result is needed.

As fp32: one reduce-scatter. As bf16: every rank sends each other rank its part in bf16 (all-to-all) and sums the parts
it receives in fp32; half the bytes of fp32, and one rounding of each summand where a bf16 ring would round every hop.
Nothing but the sum is allocated for it: rounded, fp32 gradients take half of their own memory, and received parts the
other half. Gradients that are bf16 from the start need memory for the received parts; their sum is fp32, too.

    fp32    | g0      | g1      | g2      | g3      |
    bf16    | g0 | g1 | g2 | g3 | from 0  | from 1 ..
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.blocked_times import blocked
from moefold.comm.collectives import DIST_REDUCE_SCATTER, announce, reduce_scatter_bytes
from moefold.layout.axes import Axis

Allocator = Callable[..., Tensor]  # as torch.empty


@dataclass
class PendingReduction:
    """A reduction in progress; `arrived` waits for it."""

    wait: Callable[[], object]
    result: Callable[[], Tensor]

    def arrived(self) -> Tensor:
        with blocked():
            self.wait()
        return self.result()


def wait_for_nothing() -> None: ...


def reduce_scatter_fp32(x: Tensor, axis: Axis, allocate: Allocator = torch.empty) -> PendingReduction:
    if axis.is_alone:
        return PendingReduction(wait_for_nothing, lambda: x)
    sent = reduce_scatter_bytes(x, axis)
    announce("reduce", axis, x, sent)
    size = len(x) // axis.size
    out = allocate(size, dtype=x.dtype, device=x.device)
    work = DIST_REDUCE_SCATTER(out, x, group=axis.group, async_op=True)
    return PendingReduction(work.wait, lambda: out)  # pyright: ignore[reportOptionalMemberAccess]


def reduce_scatter_bf16(x: Tensor, axis: Axis, allocate: Allocator = torch.empty) -> PendingReduction:
    if axis.is_alone:
        return PendingReduction(wait_for_nothing, lambda: x)
    if x.dtype == torch.bfloat16:
        sent = x
        size = len(x)
        received = allocate(size, dtype=x.dtype, device=x.device)
    else:
        sent, received = round_to_bf16_in_place(x)
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    wait = exchange_parts(sent, received, axis)
    parts = received.view(axis.size, -1)

    def sum_of_parts() -> Tensor:
        size = parts.shape[1]
        total = allocate(size, dtype=sum_dtype, device=x.device)
        return sum_part_by_part(parts, total)

    return PendingReduction(wait, sum_of_parts)


def exchange_parts(sent: Tensor, received: Tensor, axis: Axis) -> Callable[[], object]:
    """Start to send each rank of the axis its part, the first dim in equal parts; returns what waits for the parts of
    the others."""
    sent_bytes = reduce_scatter_bytes(sent, axis)
    announce("reduce", axis, sent, sent_bytes)
    work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
    return work.wait  # pyright: ignore[reportOptionalMemberAccess]


def sum_part_by_part(parts: Tensor, total: Tensor) -> Tensor:
    """The sum over dim 0 in the dtype of `total`, one part after the other: torch's own sum would first convert all of
    them."""
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total


def round_to_bf16_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as bf16 in the first half of its own memory, and the second half as a buffer; x itself is overwritten. Elements
    move towards the front in blocks of doubling size, each into space that earlier blocks have left, so that no copy
    overlaps its source."""
    size = len(x)
    narrow = x.view(torch.bfloat16)
    first = min(size, 4096)
    start = x[:first]
    narrow[:first] = start.to(torch.bfloat16)
    while first < size:
        last = min(2 * first, size)
        block = slice(first, last)
        narrow[block] = x[block]
        first = last
    buffer = narrow[size : 2 * size]
    return narrow[:size], buffer
