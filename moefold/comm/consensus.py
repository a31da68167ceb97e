"""Consensus of all ranks about work on the host: every rank goes on, or every rank raises the same error.

A rank that fails alone would leave the others waiting in their next collective. Here each rank reports its problem, if
any, and then all ranks go on or stop together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moefold.comm.host_objects import broadcast_object, first_object, gather_objects
from moefold.layout.axes import World

T = TypeVar("T")
HostWork = Callable[[], T]
ExplainError = Callable[[Exception], Exception]


def keep_error(error: Exception) -> Exception:
    return error


def result_of_every_rank(work: HostWork[T], world: World, explain: ExplainError = keep_error) -> T:
    """This rank's result. If the work fails anywhere, every rank raises the error of the first rank that failed, as
    `explain` words it."""
    result, problem = attempt(work, explain)
    raise_first_problem(problem, world)
    return result  # pyright: ignore[reportReturnType]


def gather_results(work: HostWork[T], world: World, explain: ExplainError = keep_error) -> list[T] | None:
    """Results of the work on every rank, by rank, on rank 0; None on the others. If the work fails anywhere, every rank
    raises the same error."""
    result = result_of_every_rank(work, world, explain)
    return gather_objects(result, world.everyone)


def result_of_rank_zero(work: HostWork[T], world: World, explain: ExplainError = keep_error) -> T:
    """Rank 0 does the work; every rank gets its result, or raises its error."""
    outcome = None, None
    if world.rank == 0:
        outcome = attempt(work, explain)
    result, problem = broadcast_object(outcome, world.everyone)
    if problem:
        raise problem
    return result  # pyright: ignore[reportReturnType]


def attempt(work: HostWork[T], explain: ExplainError) -> tuple[T | None, Exception | None]:
    """The result of the work and no error, or no result and its error."""
    try:
        return work(), None
    except Exception as error:
        return None, explain(error)


def raise_first_problem(problem: Exception | None, world: World) -> None:
    """Raise the problem of the first rank that has one, on all ranks."""
    first = first_object(problem, world.everyone)
    if first is not None:
        raise first
