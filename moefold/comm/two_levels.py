"""Sums and gathers over replicas on several nodes, in two levels: n ranks inside a node, d nodes (MegaScale-MoE, A.1).

    reduce   inside the node P -> P/n, then across nodes P/n -> P/nd
    gather   across nodes P/nd -> P/n, then inside the node P/n -> P

So links between nodes carry 1/n of what a rank has. Each level has a lane of its own: one bucket is reduced inside
nodes while the bucket before it is reduced across them.

    inside   bucket 0 | bucket 1 | bucket 2 |
    across            | bucket 0 | bucket 1 | bucket 2

The rank at place i of node k has the share k n + i, as without levels: its node reduces the shares of one node after
the other, and no share changes its place in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.comm.collectives import DIST_ALL_GATHER, announce
from moefold.comm.grad_reduce import Allocator, PendingReduction, wait_for_nothing
from moefold.comm.lanes import Lanes, Ticket
from moefold.layout.axes import Axis

Reduction = Callable[..., PendingReduction]  # as reduce_scatter_fp32


class PendingWork(Protocol):
    def wait(self) -> Any: ...


@dataclass
class LaneWork:
    """Work on a lane, awaited as torch's own."""

    ticket: Ticket

    def wait(self) -> None:
        self.ticket.result()


class LevelLanes(NamedTuple):
    inside: Lanes
    across: Lanes


@cache
def level_lanes(device: torch.device) -> LevelLanes:
    """The same for all axes, whose groups may be the same."""
    return LevelLanes(Lanes(device), Lanes(device))


# ---- sums


def reduce_over_levels(
    reduce: Reduction, x: Tensor, axis: Axis, allocate: Allocator = torch.empty
) -> PendingReduction:  # fmt: skip
    if axis.levels is None:
        return reduce(x, axis, allocate)
    inside, across = axis.levels
    lanes = level_lanes(x.device)
    in_node = lanes.inside.send(partial(reduce_in_node, reduce, x, inside, across.size), x)
    total = lanes.across.send(partial(reduce_across_nodes, reduce, in_node, across, allocate))
    return PendingReduction(wait_for_nothing, total.result)


def reduce_in_node(reduce: Reduction, x: Tensor, inside: Axis, nodes: int) -> Tensor:
    """The sums of this node for the ranks at this place of every node."""
    parts = x.view(nodes, -1)
    pending = [reduce(part, inside) for part in parts]
    sums = [reduction.arrived() for reduction in pending]
    return torch.cat(sums)


def reduce_across_nodes(reduce: Reduction, in_node: Ticket, across: Axis, allocate: Allocator) -> Tensor:
    reduction = reduce(in_node.result(), across, allocate)
    return reduction.arrived()


# ---- gathers


def gather_over_levels(gathered: Tensor, mine: Tensor, axis: Axis, what: str) -> PendingWork:
    """Start to gather the shares of all ranks of an axis."""
    if axis.levels is None:
        return start_gather(gathered, mine, axis, what)
    inside, across = axis.levels
    lanes = level_lanes(mine.device)
    of_place = lanes.across.send(partial(gather_across_nodes, mine, across, what), mine)
    whole = lanes.inside.send(partial(gather_in_node, gathered, of_place, inside, what), gathered)
    return LaneWork(whole)


def start_gather(gathered: Tensor, mine: Tensor, axis: Axis, what: str) -> Any:
    others = axis.size - 1
    sent = mine.nbytes * others
    announce(what, axis, mine, sent)
    return DIST_ALL_GATHER(gathered, mine, group=axis.group, async_op=True)


def gather_across_nodes(mine: Tensor, across: Axis, what: str) -> Tensor:
    """The shares of the ranks at this place of every node, one after the other."""
    elements = len(mine) * across.size
    shares = mine.new_empty(elements)
    start_gather(shares, mine, across, what).wait()
    return shares.view(across.size, -1)


def gather_in_node(gathered: Tensor, of_place: Ticket, inside: Axis, what: str) -> None:
    """The shares of all ranks, node by node."""
    shares = of_place.result()
    nodes = gathered.view(len(shares), -1)
    works = [start_gather(node, share, inside, what) for node, share in zip(nodes, shares, strict=True)]
    for work in works:
        work.wait()
