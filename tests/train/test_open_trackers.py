"""Trackers of a run: a missing package is refused, a failing tracker leaves the run as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.run import ObserveConfig
from moefold.observe.metrics import MetricsSink
from moefold.observe.trackers import TrackedRun
from moefold.train import open_trackers
from moefold.train.open_trackers import TRACKERS, require_trackers
from tests.support.runs import SMALL, corpus, metrics


def test_trackers_whose_packages_are_missing_are_all_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_trackers, "find_spec", lambda _: None)
    require_trackers(ObserveConfig())
    with pytest.raises(UserError) as refusal:
        require_trackers(ObserveConfig(wandb="a", mlflow="b"))
    problems = str(refusal.value)
    assert "pip install 'moefold[wandb]'" in problems
    assert "pip install 'moefold[mlflow]'" in problems


def test_a_run_ends_well_without_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(tracked: TrackedRun) -> MetricsSink:
        assert tracked.settings["train"]["steps"] == 2
        raise ConnectionError(f"no server for {tracked.group}")

    monkeypatch.setitem(TRACKERS, "wandb", refuse)
    monkeypatch.setattr(open_trackers, "find_spec", lambda name: name)
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--train.device", "cpu", "--train.steps", "2"]
    assert run_command_line([*argv, "--observe.wandb", "moe", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("no server for moe") == 1
    assert [record["step"] for record in metrics(tmp_path / "out")] == [0, 1, 2]
