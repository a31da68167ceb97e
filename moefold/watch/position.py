"""The position of this rank: its step, its phase, its last collective. Written by the run, read by the guard.

Writing is an assignment or two: no lock, no clock of the device, nothing that waits.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from moefold.watch.call_sites import CallSite, nearest_site

STEP = "step"
STEPS_REMEMBERED = 100


class LastCollective(NamedTuple):
    what: str
    axis: str
    site: CallSite

    def __str__(self) -> str:
        return f"{self.what} over {self.axis} at {self.site}"


@dataclass
class RankPosition:
    """`entries` counts changes of the phase, so that a reader sees that a new one has begun."""

    phase: str = "start"
    step: int = 0
    entries: int = 0
    collective: LastCollective | None = None
    begun: float = field(default_factory=time.monotonic)
    step_seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_REMEMBERED))

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        if self.phase == STEP:
            self.step_seconds.append(now - self.begun)
        self.begun = now
        self.phase = phase
        self.entries += 1

    def __str__(self) -> str:
        return f"step {self.step}" if self.phase == STEP else f"{self.phase} (step {self.step})"


HERE = RankPosition()  # a process is one rank


def begin_run() -> None:
    """Forget what an earlier run of this process has left."""
    HERE.step_seconds.clear()
    HERE.collective = None
    HERE.step = 0
    HERE.enter("start")


def enter_step(number: int) -> None:
    HERE.step = number
    HERE.enter(STEP)


@contextmanager
def slow_phase(name: str) -> Iterator[None]:
    """A phase that may take much longer than a step: evaluation, a checkpoint."""
    former = HERE.phase
    HERE.enter(name)
    try:
        yield
    finally:
        HERE.enter(former)


@contextmanager
def training_phase() -> Iterator[None]:
    """The steps of a run; what is behind the block is the phase `end`, whatever ends it."""
    try:
        yield
    finally:
        HERE.enter("end")


def note_collective(what: str, axis: str) -> None:
    """A collective is about to begin."""
    site = nearest_site(sys._getframe(1))
    HERE.collective = LastCollective(what, axis, site)
