"""The host's own affairs: garbage is collected when it is asked for, and wishes of any rank reach all."""

from __future__ import annotations

import gc

from moefold.layout.axes import World
from moefold.train.host_duties import any_rank_asks, collect_garbage_manually
from tests.support.ranks import run_ranks


class Cycle:
    """Only the collector frees it."""

    alive = 0

    def __init__(self):
        self.me = self
        Cycle.alive += 1

    def __del__(self):
        Cycle.alive -= 1


def test_garbage_waits_until_it_is_collected_by_hand_and_all_is_as_before_afterwards():
    assert gc.isenabled()
    with collect_garbage_manually() as collect:
        for _ in range(5000):  # many times what sets the collector off by itself
            Cycle()
        assert Cycle.alive == 5000
        collect()
        assert Cycle.alive == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def wishes(world: World) -> list[int]:
    return [any_rank_asks(mine, world).read().item() for mine in ([], ["SIGTERM"] if world.rank == 1 else [])]


def test_a_wish_of_one_rank_is_heard_by_all():
    assert run_ranks(wishes, 2) == [[0, 1], [0, 1]]
