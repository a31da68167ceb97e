"""Trackers of runs, beside the run's own files. A tracker works in a thread of its own: a server that is slow, away or
refuses never holds or ends a run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.observe.metrics import MetricsSink, Record
from moefold.observe.printer import Printer

LAST_WAIT = 60.0  # seconds at the end of a run for what is not sent yet
LONGEST_REASON = 200  # letters


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run. `group`: the project or experiment of the run."""

    folder: Path
    group: str
    settings: dict[str, Any]


class BackgroundTracker:
    """Opens a sink and gives it records, in a thread. The first failure is said once, and ends the tracker alone."""

    def __init__(self, name: str, open_sink: Callable[[], MetricsSink], say: Printer):
        self.name = name
        self.open_sink = open_sink
        self.say = say
        self.waiting = queue.SimpleQueue[Record | None]()  # None ends the thread
        self.failure = ""
        self.is_said = False
        self.thread = threading.Thread(target=self.track, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def track(self) -> None:
        try:
            sink = self.open_sink()
            while (record := self.waiting.get()) is not None:
                sink.write(record)
            sink.close()
        except Exception as error:  # whatever a tracker raises is no matter of the run
            reason = " ".join(str(error).split())
            self.failure = f"{type(error).__name__}: {reason[:LONGEST_REASON]}"

    def write(self, record: Record) -> None:
        self.report_failure()
        if self.thread.is_alive():
            self.waiting.put(record)

    def close(self) -> None:
        self.waiting.put(None)
        self.thread.join(LAST_WAIT)
        if self.thread.is_alive():
            self.failure = f"it has not taken all records {LAST_WAIT:.0f} s after the last one"
        self.report_failure()

    def report_failure(self) -> None:
        """From the thread of the run, whose display it is."""
        if self.failure and not self.is_said:
            self.is_said = True
            self.say(f"warning: observe.{self.name} has failed ({self.failure}); the run and metrics.jsonl go on")
