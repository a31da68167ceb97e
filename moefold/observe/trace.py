"""Writes what happened when on which rank, for https://ui.perfetto.dev or chrome://tracing.

A simulation and a run write the same events, so that the predicted and the measured step can be laid side by side:

    rank 0   compute   F0.0  F0.1  ...         one process a rank, one thread a lane; an event has a name, a beginning,
             comm            F0.0              an end, and whatever else is worth seeing when it is clicked
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LANE_ORDER = ("compute", "comm")  # the order in which a rank's lanes are shown; others follow


@dataclass(frozen=True)
class TraceEvent:
    """Something that took from `start` to `end`, in seconds from the beginning of the trace."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """The events in the Chrome trace format, with ranks and lanes named and in order."""
    events = list(events)
    lanes = [*LANE_ORDER, *sorted({event.lane for event in events} - set(LANE_ORDER))]
    tracks = sorted({(event.rank, lanes.index(event.lane)) for event in events})
    records: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in tracks}):
        records.append(metadata_record("process_name", rank, 0, {"name": f"rank {rank}"}))
        records.append(metadata_record("process_sort_index", rank, 0, {"sort_index": rank}))
    records += [metadata_record("thread_name", rank, lane, {"name": lanes[lane]}) for rank, lane in tracks]
    for event in sorted(events, key=lambda event: (event.start, event.rank)):
        record = {"ph": "X", "name": event.name, "cat": event.lane, "pid": event.rank, "tid": lanes.index(event.lane)}
        times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
        records.append({**record, **times, "args": dict(event.details)})
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def metadata_record(what: str, rank: int, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": args}


def write_trace(path: Path, events: Iterable[TraceEvent]) -> None:
    path.write_text(json.dumps(chrome_trace(events)), encoding="utf-8")


class SpanRecorder:
    """Spans of work on one rank, by the clock of its machine. Nothing is recorded until recording starts."""

    def __init__(self, rank: int, recording: bool = False):
        self.rank, self.recording = rank, recording
        self.events: list[TraceEvent] = []

    def start_recording(self) -> None:
        """Record from now on, beginning with an empty list."""
        self.recording, self.events = True, []

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        if not self.recording:
            yield
            return
        start = time.time()  # the one clock that ranks of a machine share
        try:
            yield
        finally:
            self.add_span(name, lane, start)

    def add_span(self, name: str, lane: str, start: float) -> None:
        """Record a span that ends now."""
        self.events.append(TraceEvent(self.rank, lane, name, start, time.time()))


class ObservedSpec(Protocol):
    """The fields of a step's specification that a trace shows."""

    @property
    def name(self) -> str: ...

    @property
    def lane(self) -> str: ...


class ObservedStep(Protocol):
    @property
    def spec(self) -> ObservedSpec: ...


class StepTracer:
    """An observer of steps (`Around` in model/steps.py) that records a span for each, on the step's own lane."""

    def __init__(self, spans: SpanRecorder):
        self.spans = spans
        self.started: dict[tuple[int, str, tuple[int, int]], float] = {}

    def before(self, step: ObservedStep, kind: str, key: tuple[int, int]) -> None:
        self.started[id(step), kind, key] = time.time()

    def after(self, step: ObservedStep, kind: str, key: tuple[int, int]) -> None:
        start = self.started.pop((id(step), kind, key))
        stage, microbatch = key
        self.spans.add_span(f"{step.spec.name} {kind}{stage}.{microbatch}", step.spec.lane, start)
