"""How many bytes this rank sends, by collective and axis, while somebody counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.layout.axes import Axis

COUNTERS: list[Counter[tuple[str, str]]] = []


def note(what: str, axis: Axis, sent: int) -> None:
    """Bytes that leave this rank in one collective, as a ring would send them."""
    for counter in COUNTERS:
        counter[what, axis.name] += sent


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Bytes sent inside the block, by (collective, axis)."""
    counter: Counter[tuple[str, str]] = Counter()
    COUNTERS.append(counter)
    try:
        yield counter
    finally:
        COUNTERS.pop()  # blocks nest; remove() would take another that has counted the same
