"""Runs that go on: read again and again, and told in parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moefold.config.errors import UserError
from moefold.printable import escape_character
from moefold.web.page_numbers import JsonObject
from moefold.web.run_folder import describe_absent_run
from moefold.web.run_list import distinct_labels
from moefold.web.run_summary import RunSummary, ToldSteps

READ_SECONDS = 1.0  # that pass at least between two reads of the files, however many pages ask
SILENT_SECONDS = 300.0  # without a line, after which a run may have ended


class RunState(NamedTuple):
    """How a run stands, in words, and whether the reader should look."""

    text: str
    is_bad: bool = False

    def state_data(self) -> JsonObject:
        text = "".join(map(escape_character, self.text))
        return {"text": text, "is_bad": self.is_bad}


class WatchedRun:
    def __init__(self, folder: Path, label: str, runs: int, first_reading: int):
        self.folder = folder
        self.summary = RunSummary(folder, label, runs, first_reading)
        self.config_stamp: tuple[int, int] | None = None
        self.state = RunState("")
        self.was_there = False

    def read_new(self) -> None:
        """Read what the run's files have gained, and see how the run stands. What cannot be read is told."""
        try:
            self.state = self.read_files()
        except (FileNotFoundError, NotADirectoryError):
            self.state = self.describe_absence()
        except UserError as refused:
            self.state = RunState(str(refused), is_bad=True)
        except OSError as error:
            self.state = RunState(f"{self.folder} cannot be read: {error.strerror}", is_bad=True)

    def read_files(self) -> RunState:
        config_file = self.folder / "config.yaml"
        status = config_file.stat()
        stamp = status.st_mtime_ns, status.st_size
        if stamp != self.config_stamp:
            self.summary.read_config()
            self.summary.forget_files()
            self.config_stamp = stamp
        written = (self.folder / "metrics.jsonl").stat().st_mtime
        self.was_there = True
        self.summary.read_new()
        return self.describe_progress(time.time() - written)

    def describe_progress(self, silent: float) -> RunState:
        config = self.summary.config
        assert config
        steps = config.train.steps
        step = self.summary.metrics.last_step
        if step < 0:
            return RunState("waiting for the first line of metrics.jsonl")
        place = f"step {step:,} of {steps:,}"
        if step >= steps:
            return RunState(f"{place}, done")
        if silent > SILENT_SECONDS:
            return RunState(f"{place}; no line for {silent / 60:.0f} min: the run may have ended", is_bad=True)
        return RunState(f"{place}, last line {max(0, silent):.0f} s ago")

    def describe_absence(self) -> RunState:
        """What is missing: all of the run, or a file that a run writes first."""
        if self.was_there:
            return RunState(f"{self.folder} is gone, or a file of it; shown is what was read before", is_bad=True)
        if not self.folder.exists():
            return RunState(describe_absent_run(self.folder))
        return RunState(f"waiting for the first step: {self.folder} has no config.yaml or no metrics.jsonl yet")

    def news(self, told: ToldSteps) -> JsonObject:
        """The state of the run, and what is new in it since a page was told."""
        state = {"state": self.state.state_data()}
        if told == self.summary.told_now():
            return state
        return self.summary.page_data(told) | state


class WatchedRuns:
    """Read by one thread at a time."""

    def __init__(self, folders: Sequence[Path]):
        # Numbers of readings ascend over restarts of the watcher: a page of an earlier one is told everything.
        first_reading = int(time.time())
        self.labels = distinct_labels(folders)
        named = zip(folders, self.labels, strict=True)
        self.runs = [WatchedRun(folder, label, len(folders), first_reading) for folder, label in named]
        self.lock = threading.Lock()
        self.next_read = 0.0

    def news(self, told: Sequence[ToldSteps]) -> list[JsonObject]:
        with self.lock:
            self.read_if_due()
            return [run.news(steps) for run, steps in zip(self.runs, told, strict=True)]

    def read_if_due(self) -> None:
        if time.monotonic() < self.next_read:
            return
        for run in self.runs:
            run.read_new()
        self.next_read = time.monotonic() + READ_SECONDS
