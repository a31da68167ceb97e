"""What ran when, on which lane: names with a beginning and an end, in seconds since the start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    name: str
    lane: str
    begin: float
    end: float


class Spans:
    """Nothing is noted until somebody listens."""

    def __init__(self, listening: bool = False):
        self.listening, self.found = listening, list[Span]()

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        if not self.listening:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.found.append(Span(name, lane, begin, time.perf_counter()))
