"""Parallel folding, torch-free: the same ranks named twice, once for dense layers and once for expert layers.

    world 8, tp 2, ep 4          rank   0  1  2  3  4  5  6  7
    dense  grid (pp dp cp tp)     dp    0  0  1  1  2  2  3  3      tp 0 1 0 1 0 1 0 1
    expert grid (pp edp ep etp)   edp   0  0  0  0  1  1  1  1      ep 0 1 2 3 0 1 2 3

Pipeline stages are outermost in both grids, so a stage holds the same ranks whichever way it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig

Ranks = tuple[int, ...] | range


class Digit(NamedTuple):
    """Ranks that are `stride` apart, `size` of them: a digit of the rank in a mixed-radix number system."""

    stride: int
    size: int

    @property
    def span(self) -> int:
        return self.stride * self.size


Partition = tuple[Digit, ...]  # of all ranks into groups: the digits in which ranks of a group differ, outermost first


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

    def partition(self, *axes: str) -> Partition:
        """Two ranks share a group when they differ only along `axes`."""
        missing = set(axes) - set(self.sizes)
        if missing:
            raise ValueError(f"no axis {sorted(missing)} in this grid; it has {list(self.sizes)}")
        digits: list[Digit] = []  # innermost first
        stride = 1
        for name, size in reversed(self.sizes.items()):
            if name in axes and size > 1:
                digit = Digit(stride, size)
                add_outer_digit(digits, digit)
            stride *= size
        return tuple(reversed(digits))


def add_outer_digit(digits: list[Digit], outer: Digit) -> None:
    """Append a digit; two that follow each other become one, so that equal partitions compare equal."""
    if digits and digits[-1].span == outer.stride:
        inner = digits.pop()
        outer = Digit(inner.stride, inner.size * outer.size)
    digits.append(outer)


def group_of_rank(partition: Partition, rank: int) -> Ranks:
    """The ranks of one group, in order. The groups of other ranks are never listed: a world may be large."""
    first = rank
    for digit in partition:
        coordinate = rank // digit.stride % digit.size
        first -= coordinate * digit.stride
    if len(partition) == 1:
        (digit,) = partition
        return range(first, first + digit.span, digit.stride)
    offsets = [range(0, digit.span, digit.stride) for digit in partition]
    combinations = product(*offsets)
    return tuple(first + sum(offset) for offset in combinations)


def split_outermost(partition: Partition, count: int) -> tuple[Partition, Partition]:
    """The groups of a partition cut into `count` equal parts along their outermost digit, and across: the ranks at the
    same place of each part. A digit that `count` does not divide is cut into as many parts as both have in common."""
    if not partition:
        return (), ()
    outermost, *others = partition
    parts = gcd(count, outermost.size)
    inner = Digit(outermost.stride, outermost.size // parts)
    across = Digit(inner.span, parts)
    inside = tuple(others)
    if inner.size > 1:
        inside = (inner, *others)
    if parts == 1:
        return inside, ()
    return inside, (across,)


def split_by_node(partition: Partition, node_size: int) -> tuple[Partition, Partition]:
    """The groups of a partition cut into the parts that lie inside a node, and across: the ranks at the same place of
    each part. Groups that nodes do not cut evenly are taken to lie inside one node."""
    inside: Partition = ()
    across: Partition = ()
    for digit in partition:
        near, far = split_digit_by_node(digit, node_size)
        inside += near
        across += far
    return inside, across


def split_digit_by_node(digit: Digit, node_size: int) -> tuple[Partition, Partition]:
    if digit.stride % node_size == 0:
        return (), (digit,)
    whole_nodes = digit.span % node_size == 0
    cuts_evenly = whole_nodes and node_size % digit.stride == 0
    if not cuts_evenly or digit.span == node_size:
        return (digit,), ()
    inside = Digit(digit.stride, node_size // digit.stride)
    across = Digit(node_size, digit.span // node_size)
    return (inside,), (across,)


def powers_of_two_in(ranks: int) -> list[int]:
    """1, 2, 4, ... as long as they divide a number of ranks: sizes of groups that tile it, each inside the next."""
    powers = [1]
    while ranks % (2 * powers[-1]) == 0:
        powers.append(2 * powers[-1])
    return powers


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
