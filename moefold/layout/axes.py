"""An axis is a set of ranks that act together. One of size one is the identity, so the model reads as one-rank code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from moefold.config.run import ParallelConfig
from moefold.layout.fold import Grid, fold

# Every combination of axes that some collective acts over. All are created at the start, on all ranks, in this order:
# a group made lazily at its first use hangs when one rank gets there and another does not.
COMBINATIONS = [
    ("dp",),
    ("cp",),
    ("tp",),
    ("pp",),
    ("dp", "cp"),
    ("dp", "cp", "tp"),
    ("edp",),
    ("ep",),
    ("etp",),
    ("edp", "etp"),
    ("edp", "ep", "etp"),
]


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
    """This rank's place: its device, the two grids and an Axis for every combination of their axes."""

    rank: int
    size: int
    device: torch.device
    dense: Grid
    expert: Grid
    axes: dict[tuple[str, ...], Axis]
    everyone: Axis

    def axis(self, *names: str) -> Axis:
        if names not in self.axes:
            raise KeyError(f"no group was created for {names}; add it to COMBINATIONS in layout/axes.py")
        return self.axes[names]

    def grid(self, which: Literal["dense", "expert"]) -> Grid:
        return self.dense if which == "dense" else self.expert


def name_axes(rank: int, size: int, device: torch.device, parallel: ParallelConfig) -> World:
    """Fold the ranks and create every group. Equal partitions share one group; a group of one rank needs none."""
    dense, expert = fold(size, parallel)
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def axis(name: str, partition: list[tuple[int, ...]]) -> Axis:
        mine = next(ranks for ranks in partition if rank in ranks)
        known = tuple(partition)
        if known not in made:
            made[known] = create_groups(partition, rank)
        return Axis(name, mine, mine.index(rank), made[known])

    everyone = axis("world", [tuple(range(size))])
    grids = {names: dense if set(names) <= set(dense.sizes) else expert for names in COMBINATIONS}
    axes = {names: axis("_".join(names), grid.groups(*names)) for names, grid in grids.items()}
    return World(rank, size, device, dense, expert, axes, everyone)


def create_groups(partition: list[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """The group of this rank, after creating all groups of the partition, as torch.distributed asks of every rank."""
    if len(partition[0]) == 1:
        return None
    if len(partition) == 1:
        return dist.group.WORLD
    groups = [dist.new_group(list(ranks)) for ranks in partition]
    return next(g for g, ranks in zip(groups, partition, strict=True) if rank in ranks)  # pyright: ignore[reportReturnType]
