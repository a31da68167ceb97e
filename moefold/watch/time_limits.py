"""Time limits of phases, and how long this rank has been in its present phase."""

from __future__ import annotations

from dataclasses import dataclass

from moefold.watch.position import STEP, RankPosition

STEPS_TO_MEASURE = 3
LEAST_MEASURED_LIMIT = 60.0
LONGEST_STEPS = 20  # the measured limit of a step, in longest steps of late
# Seconds counted between two looks: a process that was stopped, or a machine that slept, has not waited.
LONGEST_LOOK = 1.0


@dataclass(frozen=True)
class TimeLimits:
    """Seconds for a step (0: by measured steps) and for every other phase."""

    step: float
    slow: float

    def of(self, position: RankPosition) -> float:
        if position.phase != STEP:
            return self.slow
        if self.step:
            return self.step
        if len(position.step_seconds) < STEPS_TO_MEASURE:
            return self.slow  # the first steps compile and measure kernels
        measured = LONGEST_STEPS * max(position.step_seconds)
        return max(LEAST_MEASURED_LIMIT, measured)

    def key_of(self, position: RankPosition) -> str:
        return "train.step_timeout" if position.phase == STEP else "train.slow_timeout"


class PhaseClock:
    """Seconds that this rank was seen in its present phase."""

    def __init__(self, position: RankPosition, now: float):
        self.position = position
        self.entries = position.entries
        self.looked = now
        self.seconds = 0.0

    def look(self, now: float) -> float:
        passed = now - self.looked
        self.looked = now
        self.seconds += min(passed, LONGEST_LOOK)
        if self.entries != self.position.entries:
            self.entries = self.position.entries
            self.seconds = 0.0
        return self.seconds
