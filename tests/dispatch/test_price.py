"""The predicted times choose as the published analyses do."""

from dataclasses import replace

import pytest

from moefold.config.run import ParallelConfig
from moefold.dispatch.price import Links, Trip, choose, distinct, seconds
from moefold.presets.zoo import PRESETS


def trip(k: int, ranks: int = 8, inside: int = 8) -> Trip:
    return Trip(tokens=65_536, row=4096 * 2, k=k, ranks=ranks, inside=inside)


@pytest.mark.parametrize("k", range(1, 12))
def test_gather_beats_all_to_all_by_time_beyond_six_choices_on_eight_ranks(k: int):
    """By bytes it would be beyond eight; a plain all-to-all reaches 0.79 of the link."""
    gather, swap = (seconds(name, trip(k), Links()) for name in ("all_gather", "all_to_all"))
    assert (gather < swap) == (k > 6)


def test_distinct_places_are_at_most_choices_and_places():
    assert distinct(1, 8) == pytest.approx(1)
    assert distinct(8, 64) < 8
    assert distinct(1000, 8) == pytest.approx(8)


def test_sending_a_token_once_per_node_wins_where_the_network_is_slow():
    far = trip(k=8, ranks=64, inside=8)
    times = {name: seconds(name, far, Links()) for name in ("dedup", "all_to_all", "all_gather", "hierarchical")}
    assert min(times, key=lambda name: times[name]) == "hierarchical"
    assert times["dedup"] < times["all_to_all"]


def test_the_user_is_obeyed_and_the_reason_is_told():
    config = replace(PRESETS["qwen3-30b-a3b"](), parallel=ParallelConfig(ep=8, dispatcher="all_to_all"))
    assert choose(config, 8, 2) == ("all_to_all", "asked for")
    name, why = choose(replace(config, parallel=ParallelConfig(ep=8)), 8, 2)
    assert name == "dedup"
    assert "dedup" in why
    assert "all_to_all" in why
    assert choose(replace(config, parallel=ParallelConfig()), 8, 2)[0] == "local"
