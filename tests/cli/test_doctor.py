"""`moefold doctor`: findings about this machine, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moefold.cli import doctor
from moefold.cli.doctor import Finding
from moefold.cli.main import run_command_line
from moefold.version import __version__


def test_every_check_of_a_sound_machine_is_ok(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["doctor", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"moefold {__version__}, torch " in shown
    assert "2 ranks started, met over gloo and agreed" in shown
    assert shown.endswith("all is well\n")


def test_a_failed_check_is_counted_and_sets_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full_disk() -> Iterator[Finding]:
        yield Finding(False, "0.0 GiB free here")

    monkeypatch.setattr(doctor, "check_disk_space", full_disk)
    assert run_command_line(["doctor", "--ranks", "0"]) == 1
    assert "BAD  0.0 GiB free here\n1 to mend\n" in capsys.readouterr().out


def test_a_rank_that_fails_is_reported_with_its_last_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "RANK_SCRIPT", "raise SystemExit('no gloo here')")
    (finding,) = doctor.check_local_ranks(1)
    assert not finding.ok
    assert finding.text.endswith("could not meet: no gloo here")
