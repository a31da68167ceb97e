"""The trace file, as Perfetto reads it."""

import json
from pathlib import Path

from moefold.observe.trace import TraceEvent, chrome_trace, write_trace

EVENTS = [
    TraceEvent(1, "comm", "dispatch", 0.5, 0.75),
    TraceEvent(0, "compute", "F0.0", 0.0, 0.25, {"stage": 0}),
    TraceEvent(1, "compute", "F1.0", 0.25, 0.5),
    TraceEvent(0, "host", "wait", 0.25, 0.3),
]


def test_times_are_microseconds_and_events_come_in_order(tmp_path: Path):
    write_trace(tmp_path / "t.json", EVENTS)
    read = json.loads((tmp_path / "t.json").read_text())
    assert read == chrome_trace(EVENTS)
    events = [record for record in read["traceEvents"] if record["ph"] == "X"]
    assert [record["name"] for record in events] == ["F0.0", "wait", "F1.0", "dispatch"]
    first = events[0]
    assert (first["ts"], first["dur"], first["pid"], first["args"]) == (0.0, 250_000.0, 0, {"stage": 0})


def test_a_rank_is_a_process_and_a_lane_a_thread_named_and_in_the_same_order_everywhere():
    records = [record for record in chrome_trace(EVENTS)["traceEvents"] if record["ph"] == "M"]
    ranks = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    lanes = {
        (record["pid"], record["tid"]): record["args"]["name"] for record in records if record["name"] == "thread_name"
    }
    assert ranks == {0: "rank 0", 1: "rank 1"}
    assert lanes == {(0, 0): "compute", (0, 2): "host", (1, 0): "compute", (1, 1): "comm"}
