"""How many bytes this rank sends, by collective and axis, while somebody counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.layout.axes import Axis

BytesSent = Counter[tuple[str, str]]
ACTIVE_COUNTERS: list[tuple[BytesSent, int | None]] = []  # with the thread whose sends it counts, or None for all


def note_bytes_sent(what: str, axis: Axis, sent: int) -> None:
    """Bytes that leave this rank in one collective, as a ring would send them."""
    here = threading.get_ident()
    for counter, thread in list(ACTIVE_COUNTERS):
        if thread in (None, here):
            counter[what, axis.name] += sent


@contextmanager
def counted_bytes_sent(this_thread: bool = False) -> Iterator[BytesSent]:
    """Bytes sent inside the block, by (collective, axis); those of other lanes too, unless told."""
    mine: tuple[BytesSent, int | None] = (Counter(), threading.get_ident() if this_thread else None)
    ACTIVE_COUNTERS.append(mine)
    try:
        yield mine[0]
    finally:
        at = next(
            i for i, each in enumerate(ACTIVE_COUNTERS) if each is mine
        )  # remove() would compare what was counted
        del ACTIVE_COUNTERS[at]
