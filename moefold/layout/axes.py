"""An axis is a set of ranks that act together. One of size one is the identity, so the model reads as one-rank code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moefold.config.run import ParallelConfig
from moefold.layout.fold import Grid, fold_into_grids

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


GRADIENT_AXES = [("dp", "cp"), ("dp", "cp", "tp"), ("edp",), ("edp", "etp")]  # what placements sum over

Partition = list[tuple[int, ...]]


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank acts with along `name`; `index` is its place among them."""

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class World:
    """This rank's place: its device, the two grids and an Axis for every combination of their axes. `store` is where
    all ranks can leave notes."""

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


def create_world(
    rank: int,
    size: int,
    device: torch.device,
    parallel: ParallelConfig,
    node_size: int | None = None,
    store: dist.Store | None = None,
) -> World:
    """Fold the ranks and create every group. Equal partitions share one group if they are of one `use`: collectives of
    different uses may be under way at the same time, and two ranks could begin them in different orders. A group of one
    rank needs none.
    `node_size`: how many ranks share a machine (all, if not said)."""
    dense, expert = fold_into_grids(size, parallel)
    made: dict[tuple[object, ...], dist.ProcessGroup | None] = {}

    def axis_of_partition(name: str, partition: Partition, use: str = "") -> Axis:
        mine = next(ranks for ranks in partition if rank in ranks)
        known = (use, *partition)
        if known not in made:
            made[known] = create_process_groups(partition, rank, fresh=use != "")
        return Axis(name, mine, mine.index(rank), made[known])

    everyone = axis_of_partition("world", [tuple(range(size))])
    grids = {names: dense if set(names) <= set(dense.sizes) else expert for names in AXIS_COMBINATIONS}
    axes = {
        names: axis_of_partition("_".join(names), grid.groups(*names), use="experts" if grid is expert else "")
        for names, grid in grids.items()
    }
    axes["pipe",] = axis_of_partition(
        "pipe", dense.groups("pp"), use="pipe"
    )  # sends and receives, between other ranks' collectives
    for names in GRADIENT_AXES:  # they are used while backward's own collectives run
        grid = dense if set(names) <= set(dense.sizes) else expert
        axes["gradients of", *names] = axis_of_partition(
            "gradients of " + "_".join(names), grid.groups(*names), use="gradients"
        )
    for name, grid in (("ep", expert), ("cp", dense)):
        inside, nodes = split_groups_by_node(grid.groups(name), node_size or size)
        use = "experts" if grid is expert else ""
        axes[f"{name} inside",] = axis_of_partition(f"{name} inside", inside, use)
        axes[f"{name} nodes",] = axis_of_partition(f"{name} nodes", nodes, use)
    return World(rank, size, device, dense, expert, axes, everyone, node_size or size, store)


def split_groups_by_node(partition: Partition, node_size: int) -> tuple[Partition, Partition]:
    """Each group cut into the parts that lie inside a node, and across: the ranks at the same place of each part.
    A group whose parts differ in size is taken to lie inside one node."""
    inside: Partition = []
    across: Partition = []
    for group in partition:
        parts = [tuple(r for r in group if r // node_size == node) for node in sorted({r // node_size for r in group})]
        if len({len(part) for part in parts}) > 1:
            parts = [group]
        inside += parts
        across += list(zip(*parts, strict=True))
    return inside, across


def single_rank_world(device: str = "cpu") -> World:
    """The world of a single rank: every axis has size one."""
    return create_world(0, 1, torch.device(device), ParallelConfig())


def create_process_groups(partition: Partition, rank: int, fresh: bool) -> dist.ProcessGroup | None:
    """The group of this rank, after creating all groups of the partition, as torch.distributed asks of every rank."""
    if all(len(ranks) == 1 for ranks in partition):
        return None
    if len(partition) == 1 and not fresh:
        return dist.group.WORLD
    groups = [dist.new_group(list(ranks)) for ranks in partition]
    return next(g for g, ranks in zip(groups, partition, strict=True) if rank in ranks)  # pyright: ignore[reportReturnType]
