"""Objects of the host: who gets them, and how many bytes of them a rank holds."""

from __future__ import annotations

from typing import Any

import pytest

from moefold.comm.byte_counters import counted_object_bytes
from moefold.comm.host_objects import (
    broadcast_object,
    choose_object,
    first_object,
    gather_objects,
    scatter_objects,
    union_of_sets,
)
from moefold.layout.axes import World, single_rank_world
from tests.support.ranks import run_ranks

LENGTHS = [1, 50, 0, 2000]  # of each rank's object: the longest is not the first


def use_every_form(world: World) -> dict[str, Any]:
    axis, rank = world.everyone, world.rank
    own = {"rank": rank, "text": "x" * LENGTHS[rank % 4]}
    late = own if rank in (1, 3) else None
    everything = [{"for": other} for other in range(world.size)]
    return {
        "broadcast": broadcast_object(own, axis)["rank"],
        "first": (first_object(late, axis) or {"rank": None})["rank"],
        "of none": first_object(None, axis),
        "gather": gather_objects(own, axis),
        "choose": choose_object(10 + rank, list, axis),
        "scatter": scatter_objects(everything if rank == 0 else None, axis),
        "union": union_of_sets({rank, 7}, axis),
    }


def test_each_form_gives_every_rank_what_it_says():
    by_rank = run_ranks(use_every_form, 4)
    for rank, found in enumerate(by_rank):
        assert (found["broadcast"], found["first"], found["of none"]) == (0, 1, None)
        assert found["scatter"] == {"for": rank}
        assert found["union"] == {0, 1, 2, 3, 7}
        assert found["choose"] == [10, 11, 12, 13]
        assert (found["gather"] is None) == (rank > 0)
    gathered = by_rank[0]["gather"]
    assert [(item["rank"], len(item["text"])) for item in gathered] == list(enumerate(LENGTHS))


def test_on_one_rank_nothing_is_sent_and_the_objects_stay():
    found = use_every_form(single_rank_world())
    assert found["broadcast"] == 0
    assert found["scatter"] == {"for": 0}
    assert found["union"] == {0, 7}
    assert found["choose"] == [10]


def bytes_held(world: World) -> int:
    with counted_object_bytes() as held:
        use_every_form(world)
    return held["world"]


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_but_the_first_holds_more_than_a_few_objects(size: int):
    first, *others = run_ranks(bytes_held, size)
    assert first > size * 1000 * (size == 4)
    assert max(others) < 500
