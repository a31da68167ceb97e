"""Ranks that one process plays in turns: the core that they share."""

from __future__ import annotations

import os

import pytest

from moefold.bench.played_ranks import TurnOrder, play_ranks, stay_on_first_core


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not bind threads to cores")
def test_ranks_can_share_one_core_and_the_thread_that_plays_them_keeps_all_of_its_own():
    before = os.sched_getaffinity(0)

    def cores_of(rank: int) -> set[int]:
        stay_on_first_core()
        return os.sched_getaffinity(0)

    assert play_ranks(cores_of, 2, TurnOrder(2)) == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before
