"""A tracker gets every record, and whatever happens to it is no matter of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from moefold.observe import trackers
from moefold.observe.metrics import MetricsSink, Record
from moefold.observe.trackers import BackgroundTracker


class Journal:
    """A sink that keeps records, and does something at each of them."""

    def __init__(self, act: Callable[[Record], None] = lambda _: None):
        self.records: list[Record] = []
        self.act = act
        self.is_closed = False

    def write(self, record: Record) -> None:
        self.act(record)
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


def refuse_step_2(record: Record) -> None:
    if record["step"] == 2:
        raise ConnectionError("the server\nis away")


def test_every_record_comes_in_order_and_the_sink_is_closed():
    journal = Journal()
    said: list[str] = []
    tracker = BackgroundTracker("wandb", lambda: journal, said.append)
    for step in range(50):
        tracker.write({"step": step})
    tracker.close()
    assert [record["step"] for record in journal.records] == list(range(50))
    assert journal.is_closed
    assert said == []


def test_a_failure_is_said_once_and_raises_nothing():
    journal = Journal(refuse_step_2)
    said: list[str] = []
    tracker = BackgroundTracker("wandb", lambda: journal, said.append)
    for step in (1, 2):
        tracker.write({"step": step})
    tracker.thread.join()
    for step in (3, 4):
        tracker.write({"step": step})
    tracker.close()
    assert [record["step"] for record in journal.records] == [1]
    [message] = said
    assert "observe.wandb" in message
    assert "ConnectionError: the server is away" in message


def test_a_sink_that_cannot_be_opened_is_said_at_the_end_at_the_latest():
    def refuse() -> MetricsSink:
        raise PermissionError("no key")

    said: list[str] = []
    BackgroundTracker("mlflow", refuse, said.append).close()
    assert ["no key" in message for message in said] == [True]


def test_a_sink_that_hangs_holds_neither_a_step_nor_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers, "LAST_WAIT", 0.1)
    release = threading.Event()
    journal = Journal(lambda _: release.wait() and None)
    said: list[str] = []
    tracker = BackgroundTracker("wandb", lambda: journal, said.append)
    for step in range(3):
        tracker.write({"step": step})
    tracker.close()
    release.set()
    tracker.thread.join()
    assert len(said) == 1
