"""The probe of links: every pair meets once, and the pair whose messages are held up takes long."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist

from moefold.comm import link_probe
from moefold.comm.link_probe import partner_in_round, probe_links, probed_ranks, rounds_of
from moefold.layout.axes import World
from moefold.observe.slow_links import find_slow_links
from tests.support.ranks import run_ranks

DELAY = 0.2


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_each_member_meets_every_other_one_once_and_at_the_same_time(count: int):
    met: list[tuple[int, int]] = []
    for number in range(rounds_of(count)):
        partners = [partner_in_round(place, number, count) for place in range(count)]
        for place, partner in enumerate(partners):
            if partner is not None:
                assert partners[partner] == place
                met.append((place, partner))
    assert sorted(met) == sorted([*combinations(range(count), 2), *[(b, a) for a, b in combinations(range(count), 2)]])


def test_of_very_many_ranks_the_first_of_each_node_takes_part():
    assert probed_ranks(6, 2) == [0, 1, 2, 3, 4, 5]
    assert probed_ranks(128, 8) == list(range(0, 128, 8))


def probe_behind_a_slow_link(world: World) -> Any:
    """Messages of rank 0 to rank 2 are held up on their way."""
    exchange = link_probe.exchange

    def held_up(message: Any, rank: int, axis: Any) -> None:
        if {world.rank, rank} == {0, 2} and message.numel() > 1:
            time.sleep(DELAY)
        exchange(message, rank, axis)

    link_probe.exchange = held_up
    seconds = probe_links(world)
    dist.barrier()
    return seconds


def test_a_pair_whose_messages_are_held_up_is_found():
    first, *others = run_ranks(probe_behind_a_slow_link, 3)
    assert not any(others)
    assert sorted(first) == [(0, 1), (0, 2), (1, 2)]
    found = find_slow_links(first, 3)
    assert found is not None
    assert found.where == "the link between rank 0 and rank 2"
