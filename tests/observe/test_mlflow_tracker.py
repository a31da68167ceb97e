"""What MLflow keeps of a run is what the run recorded, read from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.observe.mlflow_tracker import MlflowTracker, flat_settings
from moefold.observe.trackers import TrackedRun


def test_records_are_kept_and_a_resumed_run_goes_on_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'moefold[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked = TrackedRun(tmp_path, "experiment", {"train": {"steps": 2}})
    for step in (1, 2):
        tracker = MlflowTracker(tracked)
        tracker.write({"step": step, "loss": 3.0 - step, "imbalance": [0.5, 1.5]})
        tracker.close()
    [folder] = [path.parent for path in tmp_path.glob("mlflow/*/*/params")]
    curves = folder / "metrics"
    lines = [line.split() for line in (curves / "loss").read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step, *_ in lines] == [(2.0, 1), (1.0, 2)]
    assert (curves / "imbalance" / "layer_1").is_file()
    assert (folder / "params" / "train.steps").read_text() == "2"
    assert "status: 3" in (folder / "meta.yaml").read_text(), "finished"


def test_settings_are_flat_and_not_longer_than_mlflow_takes():
    tree = {"model": {"moe": {"experts": 8}}, "data": {"files": ("x" * 900,)}}
    flat = dict(flat_settings(tree))
    assert flat["model.moe.experts"] == "8"
    assert len(flat["data.files"]) == 500
