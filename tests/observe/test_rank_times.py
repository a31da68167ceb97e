"""Times of ranks: what is waiting and what is sending, and who is named when it persists."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moefold.observe.rank_times import LINK_FACTOR, PERSISTS, RankTimes, StragglerJudge, split_times


def test_the_rank_that_is_blocked_least_waits_for_nobody():
    times = split_times([1.0, 4.0, 1.5], [3.2, 0.2, 2.7])
    assert times.communication == 0.2
    assert times.waiting == pytest.approx([3.0, 0.0, 2.5])
    assert times.step == pytest.approx(4.2)


def named(windows: Sequence[RankTimes], factor: float = 2.0) -> list[str]:
    judge = StragglerJudge(factor)
    return [str(judge.look(times) or "") for times in windows]


EVEN = RankTimes([1.0, 1.1, 0.9], 0.1, [0.1, 0.0, 0.2])
RANK_2 = RankTimes([1.0, 1.0, 5.0], 0.1, [4.0, 4.0, 0.0])
RANK_1 = RankTimes([1.0, 5.0, 1.0], 0.1, [4.0, 0.0, 4.0])


def test_a_rank_is_named_when_it_persists_and_no_longer_than_it_does():
    slow = "rank 2 is slow: its compute takes 5 times as long as that of the others"
    assert named([EVEN, *[RANK_2] * (PERSISTS + 1), EVEN]) == ["", *[""] * (PERSISTS - 1), slow, slow, ""]


def test_nobody_is_named_for_moments_nor_where_ranks_take_turns():
    assert not any(named([RANK_2, RANK_2, EVEN, RANK_2, RANK_2, RANK_1, RANK_1, RANK_2]))
    assert not any(named([EVEN] * 10))


def test_below_the_factor_nobody_is_named_and_with_factor_0_never():
    assert not any(named([RANK_2] * 5, factor=5.1))
    assert not any(named([RANK_2] * 5, factor=0))


def test_a_link_is_named_if_communication_has_grown_on_all_ranks_and_no_rank_is_slow():
    sending = 0.1 * LINK_FACTOR * 2
    slow_link = EVEN._replace(communication=sending)
    said = named([*[EVEN] * 4, *[slow_link] * PERSISTS])
    assert said[-1] == "a link is slow: communication takes 16 times as long as at first, on all ranks"
    assert not any(said[:-1])
    always = named([slow_link] * 6)
    assert not any(always)


def test_communication_that_is_a_small_part_of_a_step_names_no_link():
    grown = EVEN._replace(communication=0.8)
    assert not any(named([*[EVEN._replace(communication=0.01)] * 4, *[grown] * 4]))
