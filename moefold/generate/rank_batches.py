"""Batches that ranks compute in turn, each with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from moefold.comm.host_objects import choose_object
from moefold.layout.axes import Axis

T = TypeVar("T")
Numbers = Sequence[int]  # of the items of a batch
ALONE = Axis("rank")


def cut_batches(numbers: Numbers, size: int) -> list[Numbers]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def compute_batches(batches: Sequence[Numbers], compute: Callable[[Numbers], Sequence[T]], ranks: Axis) -> list[T]:
    """What `compute` makes of all items, in the order of their numbers, on every rank. The batches are the same on any
    number of ranks, and so are their results."""
    found: list[tuple[int, T]] = []
    for numbers in batches[ranks.index :: ranks.size]:
        found += zip(numbers, compute(numbers), strict=True)
    return choose_object(found, in_order, ranks)


def in_order(found_by_rank: list[list[tuple[int, T]]]) -> list[T]:
    joined = dict(chain.from_iterable(found_by_rank))
    return [joined[number] for number in sorted(joined)]
