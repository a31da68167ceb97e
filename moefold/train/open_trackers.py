"""Trackers that a run's configuration asks for, each an optional package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from moefold.config.errors import UserError
from moefold.config.run import Config, ObserveConfig
from moefold.observe.metrics import MetricsSink
from moefold.observe.mlflow_tracker import MlflowTracker
from moefold.observe.printer import Printer
from moefold.observe.trackers import BackgroundTracker, TrackedRun
from moefold.observe.wandb_tracker import WandbTracker

TRACKERS: dict[str, Callable[[TrackedRun], MetricsSink]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def tracker_groups(observe: ObserveConfig) -> dict[str, str]:
    """The project or experiment of each tracker that is asked for, by the tracker's key."""
    groups = {"wandb": observe.wandb, "mlflow": observe.mlflow}
    return {name: group for name, group in groups.items() if group}


def require_trackers(observe: ObserveConfig) -> None:
    """Refuse trackers whose package is not installed."""
    problems: list[str] = []
    for name, group in tracker_groups(observe).items():
        if find_spec(name) is None:
            problems.append(
                f"observe.{name} = {group}, but the package {name} is not installed; run pip install "
                f"'moefold[{name}]', or leave out observe.{name}"
            )
    if problems:
        raise UserError(*problems)


def open_trackers(config: Config, folder: Path, say: Printer) -> list[MetricsSink]:
    sinks: list[MetricsSink] = []
    for name, group in tracker_groups(config.observe).items():
        tracked = TrackedRun(folder, group, asdict(config))
        sinks.append(BackgroundTracker(name, partial(TRACKERS[name], tracked), say))
    return sinks
