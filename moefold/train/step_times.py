"""Times of this rank's steps, exchanged every few steps along with stop requests, and recorded on rank 0.

    step      1 2 3 4 5 6 7 8 9 10                  each rank adds up its compute and its blocked time
    exchange                    ^ all-reduce of [stop requests, compute and blocked time of rank 0, of rank 1, ...]

The exchange is the all-reduce of stop requests (train/host_duties.py), which every step has: it is longer every
`observe.times_every` steps. A rank fills its own two places, and the maximum over ranks has all of them. All ranks
judge by the same numbers, so that they probe their links together when a link is found to be slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moefold.comm.blocked_times import TimedStep, timed_step
from moefold.comm.link_probe import probe_links
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.observe.printer import Printer
from moefold.observe.rank_times import TIMES_FILE, SlowPlace, StragglerJudge, TimesLog, split_times
from moefold.observe.slow_links import SlowLinks, find_slow_links
from moefold.train.assemble import Run
from moefold.watch.position import slow_phase

MICROSECONDS = 1_000_000


def timed_steps(config: Config) -> int:
    """Steps of a window, by configuration; 0: none is timed, as where a graph replays them, of which no part has a
    time."""
    return 0 if config.memory.graphs == "whole" else config.observe.times_every


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
    """Judges the times of all ranks, on every rank alike. Rank 0, which has the log, records them, and says when a rank
    or a link is found to be slow."""

    def __init__(self, world: World, log: TimesLog | None, slow_rank: float, say: Printer):
        self.world = world
        self.log = log
        self.judge = StragglerJudge(slow_rank)
        self.say = say
        self.named: SlowPlace | None = None

    def record(self, step: int, numbers: Sequence[int]) -> dict[str, Any]:
        """Metrics of a window, by the numbers that ranks have exchanged."""
        seconds = [number / MICROSECONDS for number in numbers]
        times = split_times(seconds[::2], seconds[1::2])
        slow = self.judge.look(times)
        before = self.named
        is_new = slow is not None and (before is None or before.rank != slow.rank)
        if slow is not None and slow.rank is None:
            links = before.links if before and not is_new else self.find_links()
            slow = slow._replace(links=links)
        if self.log is not None:
            self.log.write(step, times, slow)
        if is_new:
            self.say(f"step {step}: {slow}")
        self.named = slow
        return times.metrics() | (slow.metrics() if slow else {})

    def find_links(self) -> SlowLinks | None:
        with slow_phase("probe of links"):
            seconds = probe_links(self.world)
        return find_slow_links(seconds, self.world.node_size) if seconds else None

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def open_times_recorder(run: Run, last_kept: int, say: Printer) -> TimesRecorder | None:
    """The recorder of this rank; None where no step is timed."""
    observe = run.config.observe
    slow_rank = observe.slow_rank
    world = run.world
    if world.size == 1 or not timed_steps(run.config):
        return None
    log = None if world.rank else TimesLog(run.out / TIMES_FILE, last_kept)
    return TimesRecorder(world, log, slow_rank, say)
