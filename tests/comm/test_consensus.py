"""All ranks go on together, or stop together with the words of the first that failed."""

import pytest

from moefold.comm.consensus import gather_results, result_of_every_rank, result_of_rank_zero
from moefold.config.errors import UserError
from moefold.layout.axes import World, single_rank_world
from tests.support.ranks import run_ranks


def explain(error: Exception) -> Exception:
    return UserError(f"explained: {error}")


def results_by_rank(world: World) -> tuple[list[int] | None, int, int]:
    every = gather_results(lambda: world.rank * 10, world)
    own = result_of_every_rank(lambda: world.rank - 1, world)
    return every, own, result_of_rank_zero(lambda: world.rank + 7, world)


def test_rank_zero_gets_the_results_of_all_and_every_rank_that_of_rank_zero():
    assert run_ranks(results_by_rank, 2) == [([0, 10], -1, 7), (None, 0, 7)]


def fails_on_rank_one(world: World) -> str:
    def work() -> None:
        if world.rank == 1:
            raise OSError("disk full")

    with pytest.raises(UserError) as refused:
        gather_results(work, world, explain)
    return str(refused.value)


def test_every_rank_raises_the_explained_error_of_the_rank_that_failed():
    assert run_ranks(fails_on_rank_one, 2) == ["explained: disk full"] * 2


def test_an_error_stays_as_it_is_where_nothing_explains_it():
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        result_of_rank_zero(work, single_rank_world())
