"""MLflow as a tracker of runs: the one file that touches `mlflow`, of which `mlflow-skinny` is enough."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from moefold.observe.metrics import Record, curve_values
from moefold.observe.trackers import TrackedRun

LONGEST_PARAMETER = 500  # letters that every version of MLflow takes
MOST_METRICS = 1000  # of one request
MOST_PARAMETERS = 100


class MlflowTracker:
    """Writes to `MLFLOW_TRACKING_URI`, or to files in the run's folder; a resumed run goes on under its id."""

    def __init__(self, tracked: TrackedRun):
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses files without it
            place = (tracked.folder / "mlflow").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=place)
        path = tracked.folder / "mlflow_run_id"
        if path.is_file():
            self.id = path.read_text()
            self.client.update_run(self.id, status="RUNNING")
            return
        created = self.client.create_run(self.experiment_id(tracked.group), run_name=tracked.folder.name)
        self.id = created.info.run_id
        self.write_settings(tracked.settings)
        path.write_text(self.id)

    def write_settings(self, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        parameters = [Param(*each) for each in flat_settings(settings)]
        for some in batched(parameters, MOST_PARAMETERS):
            self.client.log_batch(self.id, params=some)

    def experiment_id(self, name: str) -> str:
        known = self.client.get_experiment_by_name(name)
        return known.experiment_id if known else self.client.create_experiment(name)

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        values = curve_values(record).items()
        metrics = [Metric(name, value, now, record["step"]) for name, value in values]
        for some in batched(metrics, MOST_METRICS):
            self.client.log_batch(self.id, metrics=some)

    def close(self) -> None:
        self.client.set_terminated(self.id)


def batched(items: list[Any], most: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), most):
        yield items[first : first + most]


def flat_settings(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each key with its path, and its value as MLflow takes parameters."""
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from flat_settings(value, f"{path}.")
        else:
            yield path, str(value)[:LONGEST_PARAMETER]
