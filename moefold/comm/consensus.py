"""Consensus of all ranks about work on the host: every rank gets the results, or every rank raises the same error.

A rank that fails alone would leave the others waiting in their next collective. Here each rank reports its result or
its problem first, and then all ranks go on or stop together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moefold.comm.collectives import all_gather_objects
from moefold.layout.axes import World

T = TypeVar("T")
ExplainError = Callable[[Exception], Exception]


def keep_error(error: Exception) -> Exception:
    return error


def gather_results(work: Callable[[], T], world: World, explain: ExplainError = keep_error) -> list[T]:
    """Results of the work on every rank, by rank. If it fails anywhere, every rank raises the error of the first rank
    that failed, as `explain` words it."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = explain(error)
    outcomes = all_gather_objects((result, problem), world.everyone)
    for _, problem in outcomes:
        if problem:
            raise problem
    return [result for result, _ in outcomes]


def result_of_rank_zero(work: Callable[[], T], world: World, explain: ExplainError = keep_error) -> T:
    """Rank 0 does the work; every rank gets its result, or raises its error."""

    def work_on_rank_zero() -> T | None:
        return work() if world.rank == 0 else None

    results = gather_results(work_on_rank_zero, world, explain)
    return results[0]  # pyright: ignore[reportReturnType]
