"""Times of steps on real ranks: a rank that is slowed on purpose is named, by its own compute, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.layout.axes import World
from moefold.observe.metrics import read_records
from moefold.train.host_duties import any_rank_asks
from moefold.train.step_times import StepTimer
from moefold.web.rank_times_summary import RankTimesSummary
from tests.support.launched import launched, small_ranks
from tests.support.ranks import run_ranks

KEYS = ["--train.steps", "6", "--checkpoint.every", "0", "--observe.times_every", "1", "--observe.slow_rank", "2.5"]
SLOWED = ["--observe.fault", "slow times=12 rank=1 step=1"]


@pytest.mark.extended
def test_a_rank_that_is_slowed_is_named_and_one_that_is_not_is_not(tmp_path: Path):
    """Slowed many-fold: a busy machine does not even that out."""
    with launched(small_ranks(tmp_path, "a", 2, *KEYS, *SLOWED), tmp_path / "log") as launcher:
        assert launcher.wait() == 0, launcher.output()
        said = launcher.output()
    assert said.count("rank 1 is slow: its compute takes") == 1, said
    assert "| rank 1 is slow |" in said
    *_, last = read_records(tmp_path / "a" / "times.jsonl")
    assert last["step"] == 6
    assert last["compute"][0] < last["compute"][1] / 2
    assert last["waiting"][0] > last["waiting"][1] == 0
    *_, metrics = read_records(tmp_path / "a" / "metrics.jsonl")
    assert metrics["slow_rank"] == 1
    assert metrics["waiting_s"] > 0
    summary = RankTimesSummary(tmp_path / "a")
    summary.read_new()
    assert "step 6: rank 1 is slow" in summary.describe()


def exchanged(world: World, every: int) -> list[list[int]]:
    timer = StepTimer(world, every)
    found: list[list[int]] = []
    for number in range(1, 5):
        with timer.timed():
            times = timer.window_at(number)
            found.append(any_rank_asks([], world, times).read().tolist())
    return found


@pytest.mark.parametrize(("every", "lengths"), [(0, [1, 1, 1, 1]), (2, [1, 5, 1, 5])])
def test_times_travel_with_stop_requests_and_cost_no_collective_of_their_own(every: int, lengths: list[int]):
    first, second = run_ranks(exchanged, 2, every)
    assert first == second
    assert list(map(len, first)) == lengths
    assert all(place > 0 for _, *places in first for place in places)
