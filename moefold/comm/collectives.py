"""Collectives over an Axis. On an axis of one rank that has no process group each returns its input and sends nothing.

    all_gather       every rank's part, joined along dim 0            backward: reduce_scatter
    reduce_scatter   sum over ranks; each keeps its part of dim 0     backward: all_gather
    all_to_all       rows to each rank and from each rank             backward: all_to_all, the other way
    all_reduce       sum over ranks, on every rank                    backward: all_reduce

These four are differentiable. `*_no_grad` is the collective itself, without autograd; all_reduce_max has no other form.
Whether a rank takes part never depends on what it has to send: a rank without rows sends none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.comm.blocked_times import blocked
from moefold.comm.byte_counters import note_bytes_sent
from moefold.comm.check_collectives import check_agreement
from moefold.layout.axes import Axis

RowCounts = Sequence[int]  # rows to or from each rank of an axis
Collective = Callable[..., Tensor]
BoundCollective = Callable[[Tensor], Tensor]

# torch 2.13 renamed these two and warns about the old names, which are all that 2.11 has.
DIST_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
DIST_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def announce(what: str, axis: Axis, x: Tensor, sent: int) -> None:
    """A collective on x is about to begin: check it where collectives are checked, count its bytes where those are."""
    check_agreement(what, axis, x)
    note_bytes_sent(what, axis, sent)


def all_reduce_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis: every rank ends with the same total."""
    if not axis.is_alone:
        sent = all_reduce_bytes(x, axis)
        announce("sum", axis, x, sent)
        reduce_in_place(x, dist.ReduceOp.SUM, axis)
    return x


def all_reduce_max_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """The element-wise maximum over the axis, in place."""
    if not axis.is_alone:
        sent = all_reduce_bytes(x, axis)
        announce("max", axis, x, sent)
        reduce_in_place(x, dist.ReduceOp.MAX, axis)
    return x


def reduce_in_place(x: Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    """NCCL reduces contiguous tensors alone."""
    whole = x.contiguous()
    with blocked():
        dist.all_reduce(whole, op=op, group=axis.group)
    if whole is not x:
        x.copy_(whole)


def all_reduce_bytes(x: Tensor, axis: Axis) -> int:
    """Bytes that a ring sends: a reduce-scatter and an all-gather."""
    others = axis.size - 1
    return 2 * x.nbytes * others // axis.size


def reduce_scatter_bytes(x: Tensor, axis: Axis) -> int:
    others = axis.size - 1
    return x.nbytes * others // axis.size


def all_gather_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's x, joined along dim 0; all have the same shape."""
    if axis.is_alone:
        return x
    others = axis.size - 1
    sent = x.nbytes * others
    announce("gather", axis, x, sent)
    rows, *widths = x.shape
    out = x.new_empty(rows * axis.size, *widths)
    mine = x.contiguous()
    with blocked():
        DIST_ALL_GATHER(out, mine, group=axis.group)
    return out


def reduce_scatter_no_grad(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of dim 0 of the sum over ranks."""
    if axis.is_alone:
        return x
    rows, *widths = x.shape
    part, rest = divmod(rows, axis.size)
    if rest:
        raise ValueError(f"{rows} rows do not split over {axis.name} of size {axis.size}")
    sent = reduce_scatter_bytes(x, axis)
    announce("scatter_sum", axis, x, sent)
    out = x.new_empty(part, *widths)
    whole = x.contiguous()
    with blocked():
        DIST_REDUCE_SCATTER(out, whole, group=axis.group)
    return out


def all_to_all_no_grad(x: Tensor, send: RowCounts, receive: RowCounts, axis: Axis, what: str = "rows") -> Tensor:
    """`send[i]` rows of x go to rank i, in order; the result is `receive[i]` rows from each rank i, in order."""
    if axis.is_alone:
        return x
    send = list(send)
    receive = list(receive)
    check_agreement(what, axis, x, send, receive)
    rows_sent = sum(send) - send[axis.index]
    row_bytes = x[:1].nbytes
    note_bytes_sent(what, axis, rows_sent * row_bytes)
    rows = sum(receive)
    _, *widths = x.shape
    out = x.new_empty(rows, *widths)
    sent = x.contiguous()
    with blocked():
        dist.all_to_all_single(out, sent, receive, send, group=axis.group)
    return out


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    if axis.is_alone:
        return x
    return AllGather.apply(x, axis)  # pyright: ignore[reportReturnType]


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    if axis.is_alone:
        return x
    return ReduceScatter.apply(x, axis)  # pyright: ignore[reportReturnType]


def all_to_all(x: Tensor, send: RowCounts, receive: RowCounts, axis: Axis, what: str = "rows") -> Tensor:
    if axis.is_alone:
        return x
    return AllToAll.apply(x, send, receive, axis, what)  # pyright: ignore[reportReturnType]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    if axis.is_alone:
        return x
    return AllReduce.apply(x, axis)  # pyright: ignore[reportReturnType]


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather_no_grad(x, axis)

    @staticmethod
    def backward(ctx, dy):
        dx = reduce_scatter_no_grad(dy, ctx.axis)
        return dx, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return reduce_scatter_no_grad(x, axis)

    @staticmethod
    def backward(ctx, dy):
        dx = all_gather_no_grad(dy, ctx.axis)
        return dx, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, axis, what):
        ctx.way_back = (receive, send, axis, what)
        return all_to_all_no_grad(x, send, receive, axis, what)

    @staticmethod
    def backward(ctx, dy):
        dx = all_to_all_no_grad(dy, *ctx.way_back)
        return dx, None, None, None, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        y = x.clone()
        return all_reduce_no_grad(y, axis)

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        all_reduce_no_grad(dx, ctx.axis)
        return dx, None


def bind_collective(collective: Collective, axis: Axis) -> BoundCollective:
    """A collective over one axis, for a module to hold; the identity where this rank is alone."""
    if axis.is_alone:
        return nn.Identity()
    return partial(collective, axis=axis)
