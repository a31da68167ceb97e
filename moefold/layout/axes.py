"""Axes: sets of ranks that act together. An axis of size one is the identity, so the model reads as one-rank code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moefold.config.run import ParallelConfig
from moefold.layout.fold import Grid, fold_into_grids
from moefold.layout.placement import Placement

# Every combination of axes that some collective acts over. All are created at the start, on all ranks, in this order:
# a group made lazily at its first use hangs when one rank gets there and another does not.
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
PIPE = "pipe"

Partition = list[tuple[int, ...]]


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank acts with along `name`; `index` is its place among them."""

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    size: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "size", len(self.ranks))


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

    def axis(self, *names: str) -> Axis:
        if names not in self.axes:
            raise KeyError(f"no group was created for {names}; add it to AXIS_COMBINATIONS in layout/axes.py")
        return self.axes[names]

    def gradients_of(self, placement: Placement) -> Axis:
        """The replicas of a parameter: the ranks that its gradient is summed over. A process group of its own."""
        return self.axis(GRADIENTS, *placement.gradient_sum_axes)

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

    @property
    def cp_inside(self) -> Axis:
        return self.axis(inside_node("cp"))

    @property
    def cp_nodes(self) -> Axis:
        return self.axis(across_nodes("cp"))


def inside_node(name: str) -> str:
    return f"{name} inside"


def across_nodes(name: str) -> str:
    return f"{name} nodes"


class AxisMaker:
    """Creates axes and their process groups. Equal partitions share one group if they are of one `use`: collectives of
    different uses may be under way at the same time, and two ranks could begin them in different orders."""

    def __init__(self, rank: int):
        self.rank = rank
        self.groups: dict[tuple[object, ...], dist.ProcessGroup | None] = {}

    def make_axis(self, name: str, partition: Partition, use: str = "") -> Axis:
        mine = next(ranks for ranks in partition if self.rank in ranks)
        known = (use, *partition)
        if known not in self.groups:
            is_fresh = use != ""
            self.groups[known] = create_process_groups(partition, self.rank, is_fresh)
        index = mine.index(self.rank)
        return Axis(name, mine, index, self.groups[known])


def create_world(
    rank: int,
    size: int,
    device: torch.device,
    parallel: ParallelConfig,
    node_size: int | None = None,
    store: dist.Store | None = None,
) -> World:
    """Fold the ranks into the two grids and create every group, in the same order on all ranks. `node_size`: how many
    ranks share a machine (all, if not said)."""
    dense, expert = fold_into_grids(size, parallel)
    node_size = node_size or size
    maker = AxisMaker(rank)
    everyone = maker.make_axis("world", [tuple(range(size))])
    axes: dict[tuple[str, ...], Axis] = {}
    for names in AXIS_COMBINATIONS:
        grid = grid_with_axes(names, dense, expert)
        use = "experts" if grid is expert else ""
        groups = grid.groups(*names)
        axes[names] = maker.make_axis("_".join(names), groups, use)
    # Sends and receives happen between other ranks' collectives, gradient reductions during backward's collectives.
    axes[PIPE,] = maker.make_axis(PIPE, dense.groups("pp"), use="pipe")
    for names in GRADIENT_AXES:
        grid = grid_with_axes(names, dense, expert)
        groups = grid.groups(*names)
        name = f"{GRADIENTS} {'_'.join(names)}"
        axes[GRADIENTS, *names] = maker.make_axis(name, groups, use="gradients")
    for name, grid, use in (("ep", expert, "experts"), ("cp", dense, "")):
        groups = grid.groups(name)
        inside, across = split_groups_by_node(groups, node_size)
        name_inside = inside_node(name)
        axes[name_inside,] = maker.make_axis(name_inside, inside, use)
        name_across = across_nodes(name)
        axes[name_across,] = maker.make_axis(name_across, across, use)
    return World(rank, size, device, dense, expert, axes, everyone, node_size, store)


def grid_with_axes(names: tuple[str, ...], dense: Grid, expert: Grid) -> Grid:
    return dense if set(names) <= set(dense.sizes) else expert


def split_groups_by_node(partition: Partition, node_size: int) -> tuple[Partition, Partition]:
    """Each group cut into the parts that lie inside a node, and across: the ranks at the same place of each part.
    A group whose parts differ in size is taken to lie inside one node."""
    inside: Partition = []
    across: Partition = []
    for group in partition:
        parts = parts_by_node(group, node_size)
        if len({len(part) for part in parts}) > 1:
            parts = [group]
        inside += parts
        across += list(zip(*parts, strict=True))
    return inside, across


def parts_by_node(group: tuple[int, ...], node_size: int) -> Partition:
    nodes = sorted({rank // node_size for rank in group})
    parts: Partition = []
    for node in nodes:
        part = tuple(rank for rank in group if rank // node_size == node)
        parts.append(part)
    return parts


def single_rank_world(device: str = "cpu") -> World:
    """The world of a single rank: every axis has size one."""
    return create_world(0, 1, torch.device(device), ParallelConfig())


def create_process_groups(partition: Partition, rank: int, fresh: bool) -> dist.ProcessGroup | None:
    """The group of this rank, after creating all groups of the partition, as torch.distributed asks of every rank.
    None where each group is one rank; torch's own group of all ranks where that will do."""
    if all(len(ranks) == 1 for ranks in partition):
        return None
    if len(partition) == 1 and not fresh:
        return dist.group.WORLD
    groups = [dist.new_group(list(ranks)) for ranks in partition]
    mine = next(i for i, ranks in enumerate(partition) if rank in ranks)
    return groups[mine]  # pyright: ignore[reportReturnType]
