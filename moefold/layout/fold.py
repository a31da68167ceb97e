"""Parallel folding, torch-free: the same ranks named twice, once for dense layers and once for expert layers.

    world 8, tp 2, ep 4          rank   0  1  2  3  4  5  6  7
    dense  grid (pp dp cp tp)     dp    0  0  1  1  2  2  3  3      tp 0 1 0 1 0 1 0 1
    expert grid (pp edp ep etp)   edp   0  0  0  0  1  1  1  1      ep 0 1 2 3 0 1 2 3

Pipeline stages are outermost in both grids, so a stage holds the same ranks whichever way it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig


@dataclass(frozen=True)
class Grid:
    """Ranks 0..n-1 laid out over named axes, outermost first."""

    sizes: dict[str, int]

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    def coordinates_of_rank(self, rank: int) -> dict[str, int]:
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, coordinates[name] = divmod(rank, size)
        return coordinates

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Partition the ranks: two ranks share a group when they differ only along `axes`."""
        missing = set(axes) - set(self.sizes)
        if missing:
            raise ValueError(f"no axis {sorted(missing)} in this grid; it has {list(self.sizes)}")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            coordinates = self.coordinates_of_rank(rank)
            elsewhere = tuple(index for name, index in coordinates.items() if name not in axes)
            group = groups.setdefault(elsewhere, [])
            group.append(rank)
        return [tuple(group) for group in groups.values()]


def fold_into_grids(world: int, parallel: ParallelConfig) -> tuple[Grid, Grid]:
    """Dense grid (pp, dp, cp, tp) and expert grid (pp, edp, ep, etp) over the same ranks, sharing pp."""
    p = parallel
    dense_size = p.tp * p.cp * p.pp
    dp = divide_ranks(world, "tp x cp x pp", dense_size)
    expert_size = p.etp * p.ep * p.pp
    edp = divide_ranks(world, "etp x ep x pp", expert_size)
    dense = Grid({"pp": p.pp, "dp": dp, "cp": p.cp, "tp": p.tp})
    expert = Grid({"pp": p.pp, "edp": edp, "ep": p.ep, "etp": p.etp})
    return dense, expert


def divide_ranks(world: int, name: str, ranks: int) -> int:
    """How often a product of parallel sizes goes into the number of ranks."""
    if world % ranks:
        raise UserError(f"parallel {name} = {ranks} does not divide the number of ranks, {world}")
    return world // ranks
