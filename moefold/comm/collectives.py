"""Collectives over an Axis. On an axis of size one each returns its input and sends nothing.

Those for activations are differentiable, and each is the other's backward:

    gather       every rank's part, joined along dim 0          backward: scatter_sum
    scatter_sum  sum over ranks, each keeps its part of dim 0   backward: gather
    exchange     rows to each rank and from each rank           backward: exchange, the other way
    total        sum over ranks, on every rank                  backward: total

Whether a rank takes part never depends on what it has to send: a rank without rows sends none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moefold.comm import byte_counters
from moefold.comm.check_collectives import check_agreement
from moefold.layout.axes import Axis

# torch 2.13 renamed these two and warns about the old names, which are all that 2.11 has.
DIST_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
DIST_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_no_grad(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum in place over the axis: every rank ends with the same total."""
    if axis.size > 1:
        check_agreement("sum", axis, x)
        byte_counters.note_bytes_sent("sum", axis, 2 * x.nbytes * (axis.size - 1) // axis.size)
        dist.all_reduce(x, group=axis.group)
    return x


def all_reduce_max_no_grad(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The largest over the axis, in place."""
    if axis.size > 1:
        check_agreement("max", axis, x)
        byte_counters.note_bytes_sent("max", axis, 2 * x.nbytes * (axis.size - 1) // axis.size)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


def all_gather_no_grad(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Every rank's x, joined along dim 0; all have the same shape."""
    if axis.size == 1:
        return x
    check_agreement("gather", axis, x)
    byte_counters.note_bytes_sent("gather", axis, x.nbytes * (axis.size - 1))
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    DIST_ALL_GATHER(out, x.contiguous(), group=axis.group)
    return out


def reduce_scatter_no_grad(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of dim 0 of the sum over ranks."""
    if axis.size == 1:
        return x
    if x.shape[0] % axis.size:
        raise ValueError(f"{x.shape[0]} rows do not split over {axis.name} of size {axis.size}")
    check_agreement("scatter_sum", axis, x)
    byte_counters.note_bytes_sent("scatter_sum", axis, x.nbytes * (axis.size - 1) // axis.size)
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    DIST_REDUCE_SCATTER(out, x.contiguous(), group=axis.group)
    return out


def all_to_all_no_grad(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, what: str = "rows"
) -> torch.Tensor:
    """`send[i]` rows of x go to rank i, in order; the result is `receive[i]` rows from each rank i, in order."""
    if axis.size == 1:
        return x
    check_agreement(what, axis, x, list(send), list(receive))
    elsewhere = sum(send) - send[axis.index]
    byte_counters.note_bytes_sent(what, axis, elsewhere * x[:1].nbytes if len(x) else 0)
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
    return out


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return AllGather.apply(x, axis) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return ReduceScatter.apply(x, axis) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def all_to_all(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, what: str = "rows"
) -> torch.Tensor:
    return AllToAll.apply(x, send, receive, axis, what) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return AllReduce.apply(x, axis) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather_no_grad(x, axis)

    @staticmethod
    def backward(ctx, dy):
        return reduce_scatter_no_grad(dy, ctx.axis), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return reduce_scatter_no_grad(x, axis)

    @staticmethod
    def backward(ctx, dy):
        return all_gather_no_grad(dy, ctx.axis), None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, axis, what):
        ctx.way = (receive, send, axis, what)
        return all_to_all_no_grad(x, send, receive, axis, what)

    @staticmethod
    def backward(ctx, dy):
        return all_to_all_no_grad(dy, *ctx.way), None, None, None, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_reduce_no_grad(x.clone(), axis)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce_no_grad(dy.clone(), ctx.axis), None


def all_gather_objects(item: Any, axis: Axis) -> list[Any]:
    """What each rank of the axis gave, in order, on every rank."""
    if axis.size == 1:
        return [item]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, item, group=axis.group)
    return found
