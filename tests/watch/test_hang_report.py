"""Who is named in the report of a hang, where time is counted, and what a report that somebody changed does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line
from moefold.watch.call_sites import nearest_site
from moefold.watch.hang_report import RankState, make_report, name_ranks, rank_list, write_report
from moefold.watch.position import RankPosition
from moefold.watch.time_limits import PhaseClock, TimeLimits


def rank(number: int, **changed: Any) -> RankState:
    values: dict[str, Any] = {"beat": 9, "step": 4, "answers": True, "waits": True, "place": "step 4", "site": "a.py:1"}
    return RankState(number, **(values | changed))


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([rank(0), rank(1, answers=False), rank(2, waits=False)], [1]),
        ([rank(0), rank(1), rank(2, step=3)], [2]),
        ([rank(0), rank(1, waits=False), rank(2)], [1]),
        ([rank(0), rank(1)], []),
        ([rank(0, waits=False), rank(1, waits=False)], []),
        ([rank(0, waits=False)], [0]),
        ([rank(0), RankState(1)], [1]),
    ],
    ids=["silent", "behind", "busy", "all wait", "all busy", "alone", "never heard of"],
)
def test_the_rank_that_holds_up_the_others_is_named(ranks: list[RankState], named: list[int]):
    assert name_ranks(ranks) == named


def test_ranks_that_stand_together_share_a_line():
    ranks = [rank(number, site="b.py:2" if number == 5 else "a.py:1") for number in range(8)]
    lines = make_report("step 4 did not end within 60 s", ranks).summary().splitlines()
    assert lines == [
        "step 4 did not end within 60 s",
        "  ranks 0-4, 6-7: step 4 at a.py:1",
        "  rank 5: step 4 at b.py:2",
    ]
    assert rank_list([3]) == "rank 3"


def test_time_in_which_the_process_did_not_live_does_not_count_and_a_new_phase_begins_at_zero():
    position = RankPosition()
    clock = PhaseClock(position, 0.0)
    assert clock.look(0.5) == 0.5
    assert clock.look(3600.0) == 1.5, "an hour of sleep counts as a second"
    position.enter("step")
    assert clock.look(3600.25) == 0.0


def test_the_limit_of_a_step_follows_its_measured_time():
    position = RankPosition()
    measured = TimeLimits(0.0, 1800.0)
    position.enter("step")
    assert measured.of(position) == 1800.0, "nothing is measured yet"
    position.step_seconds.extend([0.1, 7.0, 0.2])
    assert measured.of(position) == 140.0
    assert TimeLimits(5.0, 1800.0).of(position) == 5.0
    position.enter("checkpoint")
    assert measured.of(position) == 1800.0


def test_a_call_site_is_the_nearest_line_outside_of_comm_and_torch():
    site = str(nearest_site(sys._getframe()))
    assert site.startswith("test_hang_report.py:")
    assert str(nearest_site(None)) == "the backward pass"


def test_a_changed_report_is_refused_or_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command_line(["doctor", "hang", str(tmp_path)]) == 2
    path = write_report(make_report("\x1b[2J", [rank(0, stacks="\x1b]0;x\x07\nline"), rank(1)]), tmp_path)
    assert run_command_line(["doctor", "hang", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines())
    sound = json.loads(path.read_text())
    for changed in ([], {}, sound | {"ranks": [{}]}, sound | {"ranks": 3}, sound | {"named": ["x"]}, "[" * 100_000):
        path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
        assert run_command_line(["doctor", "hang", str(tmp_path)]) == 2, changed
        assert "is no report of a hang" in capsys.readouterr().err
