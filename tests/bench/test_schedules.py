"""`moefold bench schedules` on a CPU: every kind of schedule is timed, and all train alike."""

from __future__ import annotations

import json

import pytest

from moefold.bench.schedules import WAYS
from moefold.cli.bench import run_command


@pytest.mark.extended
@pytest.mark.alone
def test_every_schedule_is_timed_and_trains_alike(capsys: pytest.CaptureFixture[str]):
    assert run_command(["schedules", "--device", "cpu", "--steps", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["schedule"] for row in rows] == list(WAYS)
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["last_loss"] == pytest.approx(rows[0]["last_loss"], rel=1e-5)
