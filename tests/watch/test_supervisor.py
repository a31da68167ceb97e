"""A supervised run goes on after a fault as if there had been none, and is given up when the fault comes again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.layout.spawn import RanksEnd
from moefold.observe.metrics import read_records
from moefold.watch import supervisor
from moefold.watch.supervisor import RestartPauses, RunFault, Supervisor, is_fault
from moefold.web.fault_list import FaultList
from tests.support.launched import has_steps, launched, small_ranks, wait_until
from tests.support.runs import numbers

KEYS = ["--train.steps", "60", "--checkpoint.every", "5", "--train.validate_every", "60"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)


@pytest.mark.extended
def test_a_killed_rank_costs_a_restart_and_no_bit_of_the_losses(tmp_path: Path):
    with launched(small_ranks(tmp_path, "a", 2, *KEYS, "--restarts", "2"), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 8)), launcher.output()
        os.kill(launcher.ranks()[1], signal.SIGKILL)
        assert launcher.wait() == 0, launcher.output()
        assert "restart 1 of 2 at once, --resume auto" in launcher.output()
    with launched(small_ranks(tmp_path, "b", 2, *KEYS), tmp_path / "log-b") as undisturbed:
        assert undisturbed.wait() == 0, undisturbed.output()
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    (restart,) = read_records(tmp_path / "a" / "restarts.jsonl")
    assert restart["cause"] == "rank 1 was killed by SIGKILL"
    faults = FaultList(tmp_path / "a")
    faults.read_new()
    assert faults.describe_restarts() == f"1 (step {restart['step']}: rank 1 was killed by SIGKILL)"


def test_a_step_that_is_not_finite_twice_ends_the_run(tmp_path: Path):
    """From a checkpoint that was looked into, since the bad value could have been in it."""
    fault = ["--observe.fault", "nan output=attend layer=1 rank=1 step=8"]
    with launched(small_ranks(tmp_path, "a", 2, *KEYS, *fault, "--restarts", "5"), tmp_path / "log") as launcher:
        assert launcher.wait() == 1, launcher.output()
        said = launcher.output()
    assert "gave up: the same step has failed twice for the same reason; step 8: not finite" in said
    first, second = read_records(tmp_path / "a" / "restarts.jsonl")
    assert "NaN in output stream, step attend, layer 1, rank 1" in first["cause"]
    assert Path(first["resume"]).name.endswith("5")
    assert "gave_up" in second


class Ranks:
    """Ranks that end one after the other as told, each at a step."""

    def __init__(self, out: Path, *ends: tuple[int, int, str]):
        self.out = out
        self.ends = list(ends)
        self.resumed: list[str | None] = []

    def launch(self, resume: str | None) -> RanksEnd:
        self.resumed.append(resume)
        step, code, cause = self.ends.pop(0)
        (self.out / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        return RanksEnd(code, cause)

    def supervised(self, restarts: int) -> int:
        return Supervisor(self.launch, lambda _: "auto", self.out, restarts).run(None)


def test_restarts_are_used_up(tmp_path: Path):
    ranks = Ranks(tmp_path, (1, 1, "killed"), (2, 5, "hangs"), (3, 1, "killed"))
    assert ranks.supervised(2) == 1
    assert ranks.resumed == [None, "auto", "auto"]
    assert [record.get("restart") for record in read_records(tmp_path / "restarts.jsonl")] == [1, 2, None]


def test_the_same_step_may_fail_twice_for_two_reasons(tmp_path: Path):
    ranks = Ranks(tmp_path, (1, 1, "rank 1 was killed"), (1, 5, "hangs"), (9, 0, ""))
    assert ranks.supervised(3) == 0
    assert RunFault(3, "rank 1 was killed").repeats(RunFault(3, "rank 12 was killed"))
    assert not RunFault(3, "rank 1 was killed").repeats(RunFault(4, "rank 1 was killed"))


def test_a_restart_waits_longer_each_time_until_the_run_gets_further(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 1.0)
    pauses = RestartPauses()
    steps = (1, 1, 1, 9, 30, 30, 12, 31, 31, *[31] * 9)
    assert [pauses.after(step) for step in steps] == [1, 2, 4, 0, 0, 1, 2, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


@pytest.mark.parametrize("code", [0, 2, 129, 130, 141, 143])
def test_a_run_that_ends_by_request_or_by_refusal_is_not_started_again(tmp_path: Path, code: int):
    ranks = Ranks(tmp_path, (1, code, ""))
    assert not is_fault(code)
    assert ranks.supervised(3) == code


def test_restarts_are_refused_where_another_launcher_has_started_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run_command_line(["train", "tiny", "--restarts", "2"]) == 2
    assert "set torchrun's --max-restarts" in capsys.readouterr().err
