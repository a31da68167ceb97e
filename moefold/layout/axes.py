"""Axes: sets of ranks that act together. An axis of size one is the identity, so the model reads as one-rank code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from moefold.config.run import ParallelConfig, ShardConfig
from moefold.layout.fold import (
    Digit,
    Grid,
    Partition,
    Ranks,
    fold_into_grids,
    group_of_rank,
    powers_of_two_in,
    split_by_node,
    split_outermost,
)
from moefold.layout.placement import Placement

# Every combination of axes that some collective acts over. A rank's groups are all created at the start, in this order
# on every rank: a group made lazily at its first use hangs when one rank gets there and another does not.
AXIS_COMBINATIONS = [
    ("dp",),
    ("cp",),
    ("tp",),
    ("pp",),
    ("dp", "cp"),
    ("cp", "tp"),
    ("dp", "cp", "tp"),
    ("edp",),
    ("ep",),
    ("etp",),
    ("ep", "etp"),
    ("edp", "ep", "etp"),
]

GRADIENT_AXES = [("dp", "cp"), ("dp", "cp", "tp"), ("edp",), ("edp", "etp")]  # that placements sum gradients over
GRADIENTS = "gradients of"
COPIES = "copies of"
PIPE = "pipe"
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank acts with along `name`; `index` is its place among them. `levels`: the axis inside a
    node and the axis across nodes, where the axis is to be summed and gathered over in two levels."""

    name: str
    ranks: Ranks = (0,)
    index: int = 0
    group: Group = field(default=None, compare=False)
    levels: tuple[Axis, Axis] | None = field(default=None, compare=False)
    size: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", len(self.ranks))

    @property
    def is_alone(self) -> bool:
        """Whether collectives return their input: one rank. With a process group of its own it sends to itself."""
        return self.size == 1 and self.group is None


class ContextAxes(NamedTuple):
    """The ranks that share a sequence: along cp alone and with tp, and the parts of cp inside and across nodes."""

    cp: Axis
    cp_tp: Axis
    inside: Axis
    nodes: Axis


@dataclass(frozen=True)
class World:
    """This rank among all: its device, the dense and the expert grid, and an Axis for every combination of their axes
    that a collective acts over. `store`: a key-value store that all ranks reach.

    Axes by property (`world.ep`, `world.cp_tp`, `world.gradients_of(placement)`) are checked by the type checker;
    `axis("ep")` looks one up by name, as a placement has it."""

    rank: int
    size: int
    device: torch.device
    dense: Grid
    expert: Grid
    axes: dict[tuple[str, ...], Axis]
    everyone: Axis
    node_size: int
    store: dist.Store | None = None
    shard: ShardConfig = field(default_factory=ShardConfig)
    context_axes: dict[int, ContextAxes] = field(default_factory=dict)  # by cp size: that of the grid, or several

    def axis(self, *names: str) -> Axis:
        if names not in self.axes:
            raise KeyError(f"no group was created for {names}; add it to AXIS_COMBINATIONS in layout/axes.py")
        return self.axes[names]

    def gradients_of(self, placement: Placement) -> Axis:
        """The replicas of a parameter among which it is shared out: the ranks that its gradient is summed over, or with
        several copies those of one copy. A process group of its own."""
        return self.axis(GRADIENTS, *placement.gradient_sum_axes)

    def copies_of(self, placement: Placement) -> Axis:
        """The ranks that hold the same share of a parameter in other copies (`shard.replicas`)."""
        return self.axis(COPIES, *placement.gradient_sum_axes)

    def context(self, size: int | None = None) -> ContextAxes:
        """The ranks that share a sequence over so many cp ranks, by default those of the grid."""
        return self.context_axes[size or self.cp.size]

    @property
    def dp(self) -> Axis:
        return self.axis("dp")

    @property
    def cp(self) -> Axis:
        return self.axis("cp")

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def edp(self) -> Axis:
        return self.axis("edp")

    @property
    def ep(self) -> Axis:
        return self.axis("ep")

    @property
    def etp(self) -> Axis:
        return self.axis("etp")

    @property
    def dp_cp(self) -> Axis:
        """The ranks that hold other tokens of the global batch, for one tp rank."""
        return self.axis("dp", "cp")

    @property
    def cp_tp(self) -> Axis:
        """The ranks that hold parts of the same sequences."""
        return self.axis("cp", "tp")

    @property
    def dp_cp_tp(self) -> Axis:
        """All ranks of one pipeline stage."""
        return self.axis("dp", "cp", "tp")

    @property
    def ep_etp(self) -> Axis:
        """The ranks that hold one copy of all experts together."""
        return self.axis("ep", "etp")

    @property
    def pipe(self) -> Axis:
        """The pipeline ranks, with a process group for sends and receives alone."""
        return self.axis(PIPE)

    @property
    def ep_inside(self) -> Axis:
        """The part of ep inside this node."""
        return self.axis(inside_node("ep"))

    @property
    def ep_nodes(self) -> Axis:
        """The ranks of ep at the same place of each node."""
        return self.axis(across_nodes("ep"))


def inside_node(name: str) -> str:
    return f"{name} inside"


def across_nodes(name: str) -> str:
    return f"{name} nodes"


class AxisMaker:
    """Creates axes and their process groups. Equal partitions share one group if they are of one `use`: collectives of
    different uses may be under way at the same time, and two ranks could begin them in different orders.
    `groups_of_one`: whether one rank has groups too, and sends to itself."""

    def __init__(self, rank: int, size: int, groups_of_one: bool = False):
        self.rank = rank
        self.size = size
        self.groups_of_one = groups_of_one
        self.groups: dict[tuple[str, Partition], Group] = {}

    def make_axis(self, name: str, partition: Partition, use: str = "") -> Axis:
        ranks = group_of_rank(partition, self.rank)
        known = (use, partition)
        if known not in self.groups:
            self.groups[known] = self.create_group(ranks, use)
        index = ranks.index(self.rank)
        return Axis(name, ranks, index, self.groups[known])

    def with_levels(self, axis: Axis, partition: Partition, node_size: int) -> Axis:
        """The axis of a partition with its parts inside and across nodes, if it has both. Each level has groups of its
        own: both are at work at the same time."""
        inside, across = split_by_node(partition, node_size)
        if not inside or not across:
            return axis
        near = self.make_axis(inside_node(axis.name), inside, use="sums inside")
        far = self.make_axis(across_nodes(axis.name), across, use="sums across")
        return replace(axis, levels=(near, far))

    def make_context_axes(self, size: int, tp: int, node_size: int) -> ContextAxes:
        """The axes of neighbouring ranks that share sequences, `size` of them along cp."""
        along_cp = Digit(tp, size)
        with_tp = Digit(1, tp * size)
        partition = (along_cp,) if size > 1 else ()
        shared = (with_tp,) if with_tp.size > 1 else ()
        inside, across = split_by_node(partition, node_size)
        return ContextAxes(
            self.make_axis("cp", partition),
            self.make_axis("cp_tp", shared),
            self.make_axis(inside_node("cp"), inside),
            self.make_axis(across_nodes("cp"), across),
        )

    def create_group(self, ranks: Ranks, use: str) -> dist.ProcessGroup | None:
        """A group of these ranks; None for one rank, torch's own group of all ranks where that will do. Only members
        take part: every rank creates one group of each partition, its own, and all in the same order."""
        if len(ranks) == 1 and not self.groups_of_one:
            return None
        if len(ranks) == self.size and use == "":
            return dist.group.WORLD
        return dist.new_group(list(ranks), use_local_synchronization=True)  # pyright: ignore[reportReturnType]


def create_world(
    rank: int,
    size: int,
    device: torch.device,
    parallel: ParallelConfig,
    node_size: int | None = None,
    store: dist.Store | None = None,
    shard: ShardConfig | None = None,
    groups_of_one: bool = False,
) -> World:
    """Fold the ranks into the two grids and create this rank's groups, in the same order on all ranks. `node_size`: how
    many ranks share a machine (all, if not said). `groups_of_one`: whether axes of one rank send to themselves, by
    which collectives run where no other rank is."""
    shard = shard or ShardConfig()
    dense, expert = fold_into_grids(size, parallel)
    node_size = node_size or size
    maker = AxisMaker(rank, size, groups_of_one)
    everyone = maker.make_axis("world", (Digit(1, size),))
    axes: dict[tuple[str, ...], Axis] = {}
    for names in AXIS_COMBINATIONS:
        grid = grid_with_axes(names, dense, expert)
        use = "experts" if grid is expert else ""
        name = "_".join(names)
        axes[names] = maker.make_axis(name, grid.partition(*names), use)
    # Sends and receives happen between other ranks' collectives, gradient reductions during backward's collectives.
    pipeline = dense.partition("pp")
    axes[PIPE,] = maker.make_axis(PIPE, pipeline, use="pipe")
    for names in GRADIENT_AXES:
        grid = grid_with_axes(names, dense, expert)
        joined = "_".join(names)
        inside, across = split_outermost(grid.partition(*names), shard.replicas)
        gradients = maker.make_axis(f"{GRADIENTS} {joined}", inside, use="gradients")
        if shard.sync == "hierarchical":
            gradients = maker.with_levels(gradients, inside, node_size)
        axes[GRADIENTS, *names] = gradients
        axes[COPIES, *names] = maker.make_axis(f"{COPIES} {joined}", across, use="gradients")
    inside, across = split_by_node(expert.partition("ep"), node_size)
    for name, partition in ((inside_node("ep"), inside), (across_nodes("ep"), across)):
        axes[name,] = maker.make_axis(name, partition, use="experts")
    context_axes: dict[int, ContextAxes] = {}
    for ranks in context_sizes(dense, parallel):
        context_axes[ranks] = maker.make_context_axes(ranks, dense.sizes["tp"], node_size)
    return World(rank, size, device, dense, expert, axes, everyone, node_size, store, shard, context_axes)


def context_sizes(dense: Grid, parallel: ParallelConfig) -> list[int]:
    """Sizes of context-parallel groups: cp alone, or cp and all powers of two that divide dp x cp."""
    cp = dense.sizes["cp"]
    if parallel.context_sizes == "fixed":
        return [cp]
    powers = powers_of_two_in(dense.sizes["dp"] * cp)
    return sorted({cp, *powers})


def grid_with_axes(names: tuple[str, ...], dense: Grid, expert: Grid) -> Grid:
    return dense if set(names) <= set(dense.sizes) else expert


def single_rank_world(device: str = "cpu") -> World:
    """The world of a single rank: every axis has size one."""
    only_device = torch.device(device)
    return create_world(0, 1, only_device, ParallelConfig())
