"""Batches are computed once each, by ranks in turn, and every rank has all results in order."""

from __future__ import annotations

from moefold.generate.rank_batches import ALONE, Numbers, compute_batches, cut_batches
from moefold.layout.axes import World
from tests.support.ranks import run_ranks

ORDER = [3, 0, 4, 1, 2]


def computed(world: World) -> tuple[list[str], list[Numbers]]:
    seen: list[Numbers] = []

    def name_items(numbers: Numbers) -> list[str]:
        seen.append(numbers)
        return [f"item {number}" for number in numbers]

    return compute_batches(cut_batches(ORDER, 2), name_items, world.everyone), seen


def test_results_are_in_order_on_every_rank_and_no_batch_is_computed_twice():
    for ranks in (2, 4):
        found = run_ranks(computed, ranks)
        assert [results for results, _ in found] == [[f"item {number}" for number in range(5)]] * ranks
        batches = [list(numbers) for _, seen in found for numbers in seen]
        assert sorted(batches) == [[2], [3, 0], [4, 1]]


def test_one_rank_computes_all():
    assert compute_batches([[1], [0]], lambda numbers: [number * 2 for number in numbers], ALONE) == [0, 2]
    assert compute_batches([], lambda numbers: numbers, ALONE) == []
