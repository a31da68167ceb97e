"""Counters of the bytes that this rank sends, by collective and axis, and of the bytes of host objects that reach it,
by axis. Nothing is counted unless a counter is active."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moefold.layout.axes import Axis
from moefold.watch.position import note_collective

BytesSent = Counter[tuple[str, str]]


@dataclass(eq=False)
class ActiveCounter:
    """Bytes by (collective, axis); `thread` is the one whose sends are counted, None for all threads."""

    thread: int | None
    sent: BytesSent = field(default_factory=Counter)


ACTIVE_COUNTERS: list[ActiveCounter] = []


def note_bytes_sent(what: str, axis: Axis, sent: int) -> None:
    """Bytes that leave this rank in one collective, as a ring would send them."""
    note_collective(what, axis.name)
    count_bytes(what, axis, sent)


def count_bytes(what: str, axis: Axis, sent: int) -> None:
    """Count bytes that go between this rank and others."""
    here = threading.get_ident()
    for counter in list(ACTIVE_COUNTERS):
        if counter.thread in (None, here):
            counter.sent[what, axis.name] += sent


def bytes_are_counted() -> bool:
    """Whether anything is counted: a number that only the device knows is read for a counter alone."""
    return bool(ACTIVE_COUNTERS)


@contextmanager
def counted_bytes_sent(this_thread: bool = False) -> Iterator[BytesSent]:
    """Bytes sent inside the block, by (collective, axis): those of all threads, or of this thread alone."""
    counter = ActiveCounter(threading.get_ident() if this_thread else None)
    ACTIVE_COUNTERS.append(counter)
    try:
        yield counter.sent
    finally:
        ACTIVE_COUNTERS.remove(counter)


ACTIVE_OBJECT_COUNTERS: list[Counter[str]] = []


def note_object_bytes(axis: Axis, arrived: int) -> None:
    """Bytes of pickled objects that this rank holds at the end of one collective of host_objects.py."""
    for counter in list(ACTIVE_OBJECT_COUNTERS):
        counter[axis.name] += arrived


@contextmanager
def counted_object_bytes() -> Iterator[Counter[str]]:
    """Bytes of host objects that reach this rank inside the block, by axis."""
    counter: Counter[str] = Counter()
    ACTIVE_OBJECT_COUNTERS.append(counter)
    try:
        yield counter
    finally:
        ACTIVE_OBJECT_COUNTERS.remove(counter)
