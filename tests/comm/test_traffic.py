"""The bytes that are counted are those that leave a rank."""

from __future__ import annotations

import pytest
import torch

from moefold.comm import traffic
from moefold.comm.collectives import exchange, gather, gather_plain, max_, scatter_sum, scatter_sum_plain, sum_, total
from moefold.comm.reduce import reduce_bf16, reduce_fp32
from moefold.comm.ring import Turn
from moefold.layout.axes import Axis, World
from tests.support.ranks import run_ranks

ONE = Axis("one")
N = 4
ROWS, WIDTH = 8, 3
SENT = [[(a + 2 * b) % 4 for b in range(N)] for a in range(N)]


def count_each(world: World) -> dict[str, dict[tuple[str, str], int]]:
    """What every collective counts, on its own."""
    axis, x = world.everyone, torch.ones(ROWS, WIDTH)
    rows = torch.ones(sum(SENT[world.rank]), WIDTH, dtype=torch.bfloat16)
    receive = [row[world.rank] for row in SENT]
    calls = {
        "sum_": lambda: sum_(x.clone(), axis),
        "max_": lambda: max_(x.clone(), axis),
        "gather": lambda: gather_plain(x, axis),
        "scatter_sum": lambda: scatter_sum_plain(x, axis),
        "exchange": lambda: exchange(rows, SENT[world.rank], receive, axis, what="parcels"),
        "turn": lambda: Turn(x, axis).arrived(),
        "reduce_fp32": lambda: reduce_fp32(x.flatten(), axis).arrived(),
        "reduce_bf16": lambda: reduce_bf16(x.flatten(), axis).arrived(),
    }
    found = {}
    for name, call in calls.items():
        with traffic.counted() as counter:
            call()
        found[name] = dict(counter)
    y = x.clone().requires_grad_()
    for name, call in {"gather": gather, "scatter_sum": scatter_sum, "total": total}.items():
        z = call(y, axis)
        with traffic.counted() as counter:
            z.sum().backward()
        found[f"backward of {name}"] = dict(counter)
    return found


def test_every_collective_counts_the_bytes_that_leave_the_rank():
    whole = ROWS * WIDTH * 4
    for rank, found in enumerate(run_ranks(count_each, N)):
        leaving = (sum(SENT[rank]) - SENT[rank][rank]) * WIDTH * 2
        assert found == {
            "sum_": {("sum", "world"): 2 * whole * (N - 1) // N},
            "max_": {("max", "world"): 2 * whole * (N - 1) // N},
            "gather": {("gather", "world"): whole * (N - 1)},
            "scatter_sum": {("scatter_sum", "world"): whole * (N - 1) // N},
            "exchange": {("parcels", "world"): leaving},
            "turn": {("turn", "world"): whole},
            "reduce_fp32": {("reduce", "world"): whole * (N - 1) // N},
            "reduce_bf16": {("reduce", "world"): whole // 2 * (N - 1) // N},
            "backward of gather": {("scatter_sum", "world"): whole * (N - 1)},
            "backward of scatter_sum": {("gather", "world"): whole // N * (N - 1)},
            "backward of total": {("sum", "world"): 2 * whole * (N - 1) // N},
        }, f"rank {rank}"


def test_an_axis_of_one_rank_counts_nothing():
    x = torch.ones(4, 2)
    with traffic.counted() as counter:
        sum_(x, ONE)
        gather_plain(x, ONE)
        scatter_sum_plain(x, ONE)
        exchange(x, [4], [4], ONE)
        Turn(x, ONE).arrived()
        reduce_fp32(x.flatten(), ONE).arrived()
        reduce_bf16(x.flatten(), ONE).arrived()
    assert not counter


def count_and_fail(counters: list[dict[tuple[str, str], int]]) -> None:
    with traffic.counted() as counter:
        counters.append(counter)
        traffic.note("a", ONE, 1)
        raise ValueError("planted")


def test_counting_ends_with_its_block_even_if_that_fails():
    counters: list[dict[tuple[str, str], int]] = []
    with pytest.raises(ValueError, match="planted"):
        count_and_fail(counters)
    traffic.note("a", ONE, 10)
    assert counters == [{("a", "one"): 1}]
    assert not traffic.COUNTERS


def test_a_block_inside_another_counts_its_own_and_the_outer_counts_both():
    with traffic.counted() as outer:
        with traffic.counted() as inner:
            traffic.note("a", ONE, 1)  # so far both have counted the same
        traffic.note("a", ONE, 10)
        traffic.note("b", Axis("other"), 100)
    assert inner == {("a", "one"): 1}
    assert outer == {("a", "one"): 11, ("b", "other"): 100}
    assert not traffic.COUNTERS
