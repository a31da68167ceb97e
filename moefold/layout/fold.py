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
        at: dict[str, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, at[name] = divmod(rank, size)
        return at

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Partition the ranks: two ranks share a group when they differ only along `axes`."""
        if missing := set(axes) - set(self.sizes):
            raise ValueError(f"no axis {sorted(missing)} in this grid; it has {list(self.sizes)}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates_of_rank(rank)
            found.setdefault(tuple(v for k, v in at.items() if k not in axes), []).append(rank)
        return [tuple(group) for group in found.values()]


def fold_into_grids(world: int, parallel: ParallelConfig) -> tuple[Grid, Grid]:
    """Dense grid (pp, dp, cp, tp) and expert grid (pp, edp, ep, etp) over the same ranks, sharing pp."""
    p = parallel
    dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
    for name, part in {"tp x cp x pp": dense, "etp x ep x pp": expert}.items():
        if world % part:
            raise UserError(f"parallel {name} = {part} does not divide the number of ranks, {world}")
    return (
        Grid({"pp": p.pp, "dp": world // dense, "cp": p.cp, "tp": p.tp}),
        Grid({"pp": p.pp, "edp": world // expert, "ep": p.ep, "etp": p.etp}),
    )
