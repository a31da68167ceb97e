"""A run that hangs is ended, with the rank that holds it up named and the stacks of the others."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.launched import has_steps, is_alive, launched, small_ranks, wait_until

pytestmark = pytest.mark.alone  # ranks that compete with other tests may be late

TIMEOUT = 4
LIMITS = ["--train.step_timeout", str(TIMEOUT), "--train.slow_timeout", "60"]
ENDLESS = ["--train.steps", "100000", "--checkpoint.every", "100000"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_rank_is_named_with_the_stacks_of_the_others_and_nothing_is_left(
    tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]
):
    from moefold.cli.main import run_command_line

    limits = ["--train.step_timeout", "250"]
    with launched(small_ranks(tmp_path, "a", 4, *ENDLESS, *limits), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 3)), launcher.output()
        ranks = launcher.ranks()
        os.kill(ranks[rank], signal.SIGSTOP)
        assert launcher.wait() == 5, "long before the limit of a step"
        assert not any(map(is_alive, ranks))
        said = launcher.output()
    assert f"rank {rank} does not answer (process {ranks[rank]} on " in said
    assert "is stopped (SIGSTOP)" in said
    assert f"rank {rank} was stopped, and does not go on" in said
    assert run_command_line(["doctor", "hang", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    for other in {0, 1, 2, 3} - {rank}:
        assert f"stacks of rank {other} " in shown
    assert f"stacks of rank {rank} " not in shown
    assert "moefold/train/step" in shown or "moefold/train/loop" in shown, shown
    assert "last collective: " in shown


def test_a_rank_that_is_too_long_in_a_step_is_named_as_behind_the_others(tmp_path: Path):
    slowed = ["--observe.fault", "slow times=100000 rank=1 step=3"]
    with launched(small_ranks(tmp_path, "a", 2, *ENDLESS, *LIMITS, *slowed), tmp_path / "log") as launcher:
        assert launcher.wait() == 5, launcher.output()
        said = launcher.output()
    assert "did not end within 4 s (train.step_timeout)" in said
    assert "rank 1 (process " in said
    assert " is behind the others" in said


def test_a_rank_that_stops_before_ranks_have_met_is_named(tmp_path: Path):
    limits = ["--train.slow_timeout", str(TIMEOUT)]
    with launched(small_ranks(tmp_path, "a", 4, *ENDLESS, *limits), tmp_path / "log") as launcher:
        assert wait_until(lambda: len(launcher.ranks()) == 4)
        os.kill(launcher.ranks()[1], signal.SIGSTOP)
        assert launcher.wait() == 5, launcher.output()
        said = launcher.output()
    assert "did not end within 4 s (train.slow_timeout)" in said or "rank 1 was stopped" in said
    assert "rank 1 was never heard of" in said or "rank 1 does not answer" in said
    report = json.loads(next((tmp_path / "a" / "hangs").glob("*.json")).read_text())
    assert report["named"] == [1]


def test_a_run_that_was_stopped_whole_goes_on(tmp_path: Path):
    """Ctrl-Z, or a machine that sleeps: time that a rank did not live through does not count."""
    argv = small_ranks(tmp_path, "a", 2, "--train.steps", "8", "--train.step_timeout", "2", *LIMITS[2:])
    argv += ["--checkpoint.every", "0"]
    with launched(argv, tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 0)), launcher.output()
        everyone = [launcher.pid, *launcher.ranks()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in everyone:
                os.kill(process, number)
            if number == signal.SIGSTOP:
                time.sleep(4)
        code = launcher.wait()
        assert code in (0, 5), launcher.output()
        if code == 5:  # a step of more than 2 s: the machine is too busy to tell
            assert "did not end within 2 s" in launcher.output()
