"""Times of this rank's steps, exchanged every few steps along with stop requests, and recorded on rank 0.

    step      1 2 3 4 5 6 7 8 9 10                  each rank adds up its compute and its blocked time
    exchange                    ^ all-reduce of [stop requests, compute and blocked time of rank 0, of rank 1, ...]

The exchange is the all-reduce of stop requests (train/host_duties.py), which every step has: it is longer every
`observe.times_every` steps. A rank fills its own two places, and the maximum over ranks has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moefold.comm.blocked_times import TimedStep, timed_step
from moefold.layout.axes import World
from moefold.observe.printer import Printer
from moefold.observe.rank_times import TIMES_FILE, SlowPlace, StragglerJudge, TimesLog, split_times
from moefold.train.assemble import Run

MICROSECONDS = 1_000_000


class StepTimer:
    """Times the steps of this rank; of a single rank none. `every`: steps of a window; 0: no step is timed."""

    def __init__(self, world: World, every: int):
        self.world = world
        self.every = every if world.size > 1 else 0
        self.steps: list[TimedStep] = []  # of the present window

    @contextmanager
    def timed(self) -> Iterator[None]:
        if not self.every:
            yield
            return
        with timed_step(self.world.device) as step:
            yield
        self.steps.append(step)

    def window_at(self, number: int) -> list[int]:
        """The places of all ranks in the exchange of a step: mean microseconds of the window before it, zeros for other
        ranks. Empty where no exchange is due. Reading waits for the step before alone, as its report does."""
        if not self.every or number % self.every or not self.steps:
            return []
        count = len(self.steps)
        blocked = sum(step.blocked_seconds for step in self.steps)
        total = sum(step.seconds for step in self.steps)
        self.steps = []
        means = [(total - blocked) / count, blocked / count]
        numbers = [0] * (2 * self.world.size)
        place = 2 * self.world.rank
        numbers[place : place + 2] = [round(mean * MICROSECONDS) for mean in means]
        return numbers


class TimesRecorder:
    """Records the times of all ranks, and says when a rank or a link is found to be slow."""

    def __init__(self, log: TimesLog, slow_rank: float, say: Printer):
        self.log = log
        self.judge = StragglerJudge(slow_rank)
        self.say = say
        self.named: SlowPlace | None = None

    def record(self, step: int, numbers: Sequence[int]) -> dict[str, Any]:
        """Metrics of a window, by the numbers that ranks have exchanged."""
        seconds = [number / MICROSECONDS for number in numbers]
        times = split_times(seconds[::2], seconds[1::2])
        slow = self.judge.look(times)
        self.log.write(step, times, slow)
        values = times.metrics()
        if slow is not None:
            values["slow_rank"] = -1 if slow.rank is None else slow.rank
            if self.named is None or self.named.rank != slow.rank:
                self.say(f"step {step}: {slow}")
        self.named = slow
        return values

    def close(self) -> None:
        self.log.close()


def open_times_recorder(run: Run, last_kept: int, say: Printer) -> TimesRecorder | None:
    """The recorder of rank 0; None on other ranks, and where no step is timed."""
    observe = run.config.observe
    slow_rank = observe.slow_rank
    if run.world.rank or run.world.size == 1 or not observe.times_every:
        return None
    log = TimesLog(run.out / TIMES_FILE, last_kept)
    return TimesRecorder(log, slow_rank, say)
