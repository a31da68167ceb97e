"""Traces of a step, for https://ui.perfetto.dev or chrome://tracing: spans of work by rank and lane.

A simulation and a run write the same events, so that the predicted and the measured step can be compared:

    rank 0   compute   F0.0  F0.1  ...         one process a rank, one thread a lane; an event has a name, a start,
             comm            F0.0              an end, and details that are shown when it is clicked
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

LANE_ORDER = ("compute", "comm")  # the order in which a rank's lanes are shown; others follow
TraceRecord = dict[str, Any]  # of the Chrome trace format
PassKey = tuple[int, int]  # stage and microbatch


@dataclass(frozen=True)
class TraceEvent:
    """A span from `start` to `end`, in seconds from the beginning of the trace."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)

    def shifted(self, seconds: float) -> TraceEvent:
        """The same span, that much later."""
        start = self.start + seconds
        end = self.end + seconds
        return replace(self, start=start, end=end)


def chrome_trace(events: Iterable[TraceEvent]) -> TraceRecord:
    """The events in the Chrome trace format, with ranks and lanes named and in order."""
    ordered = sorted(events, key=attrgetter("start", "rank"))
    lanes = lane_names(ordered)
    records = track_records(ordered, lanes)
    records += [event_record(event, lanes) for event in ordered]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def lane_names(events: Sequence[TraceEvent]) -> list[str]:
    lanes = {event.lane for event in events}
    others = lanes - set(LANE_ORDER)
    return [*LANE_ORDER, *sorted(others)]


def track_records(events: Sequence[TraceEvent], lanes: list[str]) -> list[TraceRecord]:
    """Names and order of processes (ranks) and threads (lanes)."""
    ranks: set[int] = set()
    tracks: set[tuple[int, int]] = set()
    for event in events:
        lane = lanes.index(event.lane)
        ranks.add(event.rank)
        tracks.add((event.rank, lane))
    records: list[TraceRecord] = []
    for rank in sorted(ranks):
        name = metadata_record("process_name", rank, name=f"rank {rank}")
        place = metadata_record("process_sort_index", rank, sort_index=rank)
        records += [name, place]
    for rank, lane in sorted(tracks):
        name = lanes[lane]
        record = metadata_record("thread_name", rank, lane, name=name)
        records.append(record)
    return records


def event_record(event: TraceEvent, lanes: list[str]) -> TraceRecord:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": event.rank,
        "tid": lanes.index(event.lane),
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": dict(event.details),
    }


def metadata_record(what: str, rank: int, lane: int = 0, **args: Any) -> TraceRecord:
    return {
        "ph": "M",
        "name": what,
        "pid": rank,
        "tid": lane,
        "args": args,
    }


def write_trace(path: Path, events: Iterable[TraceEvent]) -> None:
    trace = chrome_trace(events)
    text = json.dumps(trace)
    path.write_text(text, encoding="utf-8")


class SpanRecorder:
    """Spans of work on one rank, by the clock of its machine. Nothing is recorded until recording starts."""

    def __init__(self, rank: int, recording: bool = False):
        self.rank = rank
        self.recording = recording
        self.events: list[TraceEvent] = []

    def start_recording(self) -> None:
        """TraceRecord from now on, beginning with an empty list."""
        self.recording = True
        self.events = []

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
        """TraceRecord a span that ends now."""
        end = time.time()
        event = TraceEvent(self.rank, lane, name, start, end)
        self.events.append(event)


class ObservedSpec(Protocol):
    """The fields of a step's specification that a trace shows."""

    @property
    def label(self) -> str: ...

    @property
    def lane(self) -> str: ...


class ObservedStep(Protocol):
    @property
    def spec(self) -> ObservedSpec: ...


class StepTracer:
    """An observer of steps (`Around` in model/steps.py) that records a span for each, on the step's own lane."""

    def __init__(self, spans: SpanRecorder):
        self.spans = spans
        self.started: dict[tuple[int, str, PassKey], float] = {}

    def before(self, step: ObservedStep, kind: str, key: PassKey) -> None:
        started = (id(step), kind, key)
        self.started[started] = time.time()

    def after(self, step: ObservedStep, kind: str, key: PassKey) -> None:
        started = (id(step), kind, key)
        start = self.started.pop(started)
        stage, microbatch = key
        spec = step.spec
        self.spans.add_span(f"{spec.label} {kind}{stage}.{microbatch}", spec.lane, start)
