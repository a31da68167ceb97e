"""The bytes that are counted are those that leave a rank."""

from __future__ import annotations

import pytest
import torch

from moefold.comm import byte_counters
from moefold.comm.collectives import (
    all_gather,
    all_gather_no_grad,
    all_reduce,
    all_reduce_max_no_grad,
    all_reduce_no_grad,
    all_to_all,
    reduce_scatter,
    reduce_scatter_no_grad,
)
from moefold.comm.grad_reduce import reduce_scatter_bf16, reduce_scatter_fp32
from moefold.comm.ring_shift import RingShift
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
        "sum_": lambda: all_reduce_no_grad(x.clone(), axis),
        "max_": lambda: all_reduce_max_no_grad(x.clone(), axis),
        "gather": lambda: all_gather_no_grad(x, axis),
        "scatter_sum": lambda: reduce_scatter_no_grad(x, axis),
        "exchange": lambda: all_to_all(rows, SENT[world.rank], receive, axis, what="parcels"),
        "turn": lambda: RingShift(x, axis).arrived(),
        "reduce_fp32": lambda: reduce_scatter_fp32(x.flatten(), axis).arrived(),
        "reduce_bf16": lambda: reduce_scatter_bf16(x.flatten(), axis).arrived(),
    }
    found = {}
    for name, call in calls.items():
        with byte_counters.counted_bytes_sent() as counter:
            call()
        found[name] = dict(counter)
    y = x.clone().requires_grad_()
    for name, call in {"gather": all_gather, "scatter_sum": reduce_scatter, "total": all_reduce}.items():
        z = call(y, axis)
        with byte_counters.counted_bytes_sent() as counter:
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
    with byte_counters.counted_bytes_sent() as counter:
        all_reduce_no_grad(x, ONE)
        all_gather_no_grad(x, ONE)
        reduce_scatter_no_grad(x, ONE)
        all_to_all(x, [4], [4], ONE)
        RingShift(x, ONE).arrived()
        reduce_scatter_fp32(x.flatten(), ONE).arrived()
        reduce_scatter_bf16(x.flatten(), ONE).arrived()
    assert not counter


def count_and_fail(counters: list[dict[tuple[str, str], int]]) -> None:
    with byte_counters.counted_bytes_sent() as counter:
        counters.append(counter)
        byte_counters.note_bytes_sent("a", ONE, 1)
        raise ValueError("planted")


def test_counting_ends_with_its_block_even_if_that_fails():
    counters: list[dict[tuple[str, str], int]] = []
    with pytest.raises(ValueError, match="planted"):
        count_and_fail(counters)
    byte_counters.note_bytes_sent("a", ONE, 10)
    assert counters == [{("a", "one"): 1}]
    assert not byte_counters.ACTIVE_COUNTERS


def test_a_block_inside_another_counts_its_own_and_the_outer_counts_both():
    with byte_counters.counted_bytes_sent() as outer:
        with byte_counters.counted_bytes_sent() as inner:
            byte_counters.note_bytes_sent("a", ONE, 1)  # so far both have counted the same
        byte_counters.note_bytes_sent("a", ONE, 10)
        byte_counters.note_bytes_sent("b", Axis("other"), 100)
    assert inner == {("a", "one"): 1}
    assert outer == {("a", "one"): 11, ("b", "other"): 100}
    assert not byte_counters.ACTIVE_COUNTERS
