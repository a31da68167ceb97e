"""Sums and gathers in two levels: what one level gives, and the bytes of MegaScale-MoE's appendix A.1."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moefold.comm import two_levels
from moefold.comm.byte_counters import counted_bytes_sent
from moefold.comm.grad_reduce import PendingReduction, reduce_scatter_bf16, reduce_scatter_fp32
from moefold.comm.two_levels import gather_over_levels, reduce_over_levels
from moefold.config.run import ParallelConfig, ShardConfig
from moefold.layout.axes import Axis, World, create_world
from tests.support.ranks import run_ranks

HIERARCHICAL = ShardConfig(sync="hierarchical")
RANKS = 8
SIZE = 48 * RANKS
Layout = tuple[int, dict[str, int]]  # ranks of a node, parallel degrees
REDUCTIONS = {"fp32": reduce_scatter_fp32, "bf16": reduce_scatter_bf16}


def replicas_on_nodes(world: World, node_size: int, **degrees: int) -> Axis:
    parallel = ParallelConfig(**degrees)
    here = create_world(world.rank, world.size, world.device, parallel, node_size, shard=HIERARCHICAL)
    return here.axis("gradients of", "edp", "etp")


def values(rank: int, bucket: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order, in bf16 too."""
    generator = torch.Generator().manual_seed(100 * rank + bucket)
    return torch.randint(-8, 8, (SIZE,), generator=generator).float()


def share_of(whole: Tensor, axis: Axis) -> Tensor:
    return whole.view(axis.size, -1)[axis.index]


def wrong_results(world: World, layouts: list[Layout]) -> list[str]:
    found: list[str] = []
    for node_size, degrees in layouts:
        axis = replicas_on_nodes(world, node_size, **degrees)
        for name in REDUCTIONS:
            found += [f"{name}, nodes of {node_size}, {degrees}: {wrong}" for wrong in wrong_on_axis(world, axis, name)]
    return found


def wrong_on_axis(world: World, axis: Axis, name: str) -> list[str]:
    """Three buckets under way at a time, summed and gathered again."""
    assert axis.levels is not None
    pending = [reduce_over_levels(REDUCTIONS[name], values(world.rank, n), axis) for n in range(3)]
    shares = [reduction.arrived() for reduction in pending]
    expected = [sum((values(rank, n) for rank in axis.ranks), torch.zeros(SIZE)) for n in range(3)]
    whole = [torch.empty(SIZE) for _ in range(3)]
    works = [gather_over_levels(out, share, axis, "publish") for out, share in zip(whole, shares, strict=True)]
    for work in works:
        work.wait()
    found: list[str] = []
    for n in range(3):
        if not torch.equal(shares[n], share_of(expected[n], axis)):
            found.append(f"sum of bucket {n} on rank {world.rank}")
        if not torch.equal(whole[n], expected[n]):
            found.append(f"bucket {n} gathered on rank {world.rank}")
    return found


def test_shares_and_gathered_weights_are_those_of_one_level():
    layouts: list[Layout] = [(4, {}), (2, {}), (4, {"ep": 2}), (4, {"etp": 2, "ep": 2})]
    found = run_ranks(wrong_results, RANKS, layouts)
    assert found == [[]] * RANKS


def traffic(world: World, node_size: int) -> Counter[tuple[str, str]]:
    axis = replicas_on_nodes(world, node_size)
    with counted_bytes_sent() as sent:
        share = reduce_over_levels(reduce_scatter_fp32, values(world.rank, 0), axis).arrived()
        gather_over_levels(torch.empty(SIZE), share, axis, "publish").wait()
    return Counter({(what, name.rpartition(" ")[2]): count for (what, name), count in sent.items()})


@pytest.mark.parametrize("node_size", [2, 4])
def test_bytes_of_each_link_are_those_of_the_formulas(node_size: int):
    """Each way P (n-1)/n inside a node and P/n (d-1)/d across, for n ranks on each of d nodes."""
    n, d = node_size, RANKS // node_size
    whole = SIZE * 4
    inside, across = whole * (n - 1) // n, whole // n * (d - 1) // d
    for sent in run_ranks(traffic, RANKS, node_size):
        assert sent["reduce", "inside"] == sent["publish", "inside"] == inside
        assert sent["reduce", "nodes"] == sent["publish", "nodes"] == across
        assert len(sent) == 4


BUCKETS = 4
LONGEST = 5.0  # seconds that an exchange waits for the one beside it
EXCHANGES = {"inside": 2, "nodes": 1}  # of a bucket, with two nodes


class Meetings:
    """Exchanges of buckets, each of which ends only when that of its neighbour on the other level has begun: of bucket
    n on the `first` level, and of bucket n - 1 on the second. `alone` has those that waited in vain."""

    def __init__(self, first: str):
        self.first = first
        self.calls = Counter[str]()
        self.begun = {(level, number): threading.Event() for level in EXCHANGES for number in range(BUCKETS)}
        self.alone: list[tuple[str, int]] = []

    def begin(self, axis: Axis) -> tuple[str, int]:
        level = axis.name.rpartition(" ")[2]
        number = self.calls[level] // EXCHANGES[level]
        self.calls[level] += 1
        self.begun[level, number].set()
        return level, number

    def meet(self, level: str, number: int) -> None:
        (other,) = EXCHANGES.keys() - {level}
        neighbour = number - 1 if level == self.first else number + 1
        if 0 <= neighbour < BUCKETS and not self.begun[other, neighbour].wait(LONGEST):
            self.alone.append((level, number))

    def reduce(self, x: Tensor, axis: Axis, *memory: Any) -> PendingReduction:
        exchange = self.begin(axis)
        reduction = reduce_scatter_fp32(x, axis, *memory)

        def wait() -> None:
            reduction.wait()
            self.meet(*exchange)

        return PendingReduction(wait, reduction.result)

    def gather(self, gathered: Tensor, mine: Tensor, axis: Axis, what: str) -> PendingReduction:
        exchange = self.begin(axis)
        work = START_GATHER(gathered, mine, axis, what)

        def wait() -> None:
            work.wait()
            self.meet(*exchange)

        return PendingReduction(wait, lambda: gathered)


START_GATHER = two_levels.start_gather


def exchanges_alone(world: World) -> list[tuple[str, int]]:
    """Of buckets that are summed, and gathered again."""
    axis = replicas_on_nodes(world, 2)
    sums, gathers = Meetings("inside"), Meetings("nodes")
    pending = [reduce_over_levels(sums.reduce, values(world.rank, n), axis) for n in range(BUCKETS)]
    shares = [reduction.arrived() for reduction in pending]
    with mock.patch.object(two_levels, "start_gather", gathers.gather):
        works = [gather_over_levels(torch.empty(SIZE), share, axis, "publish") for share in shares]
        for work in works:
            work.wait()
    assert sums.calls == gathers.calls == Counter({level: BUCKETS * each for level, each in EXCHANGES.items()})
    return sums.alone + gathers.alone


def test_a_bucket_is_inside_nodes_while_the_one_before_it_is_across_them_and_the_other_way_round_when_gathered():
    assert run_ranks(exchanges_alone, 4) == [[]] * 4


def levels(world: World, layouts: list[Layout]) -> list[object]:
    return [replicas_on_nodes(world, node_size, **degrees).levels for node_size, degrees in layouts]


def test_replicas_that_lie_in_one_node_or_in_a_node_each_have_one_level():
    layouts: list[Layout] = [(8, {}), (1, {}), (2, {"ep": 4}), (4, {"ep": 4})]
    assert run_ranks(levels, RANKS, layouts) == [[None] * 4] * RANKS
