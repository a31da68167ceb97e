"""Times of ranks in a step: compute, communication, waiting; and which rank or link is slow.

A rank is blocked while it is inside a collective, or waits for the end of one. Part of that time is sending, part is
waiting for ranks that come later. The rank that comes last waits for nobody, so the least blocked time of all ranks is
taken as the time of communication, and what a rank is blocked beyond it as its waiting. All else of a step is compute:
kernels, reading data, Python.

A rank is slow if its compute takes `factor` times the median of the others', in PERSISTS successive windows of steps. A
link is slow if no rank is, and communication has become LINK_FACTOR times that of the first windows, and more than half
of the step. Which one it is, a probe tells (comm/link_probe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from moefold.observe.metrics import JsonLines, Record
from moefold.observe.slow_links import SlowLinks

TIMES_FILE = "times.jsonl"
PERSISTS = 3  # windows
LINK_FACTOR = 8.0


class RankTimes(NamedTuple):
    """Mean seconds a step of each rank, over a window of steps."""

    compute: list[float]
    communication: float
    waiting: list[float]

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return mean(self.compute) + mean(self.waiting) + self.communication

    def as_record(self) -> Record:
        return {
            "compute": rounded(self.compute),
            "communication": round(self.communication, 6),
            "waiting": rounded(self.waiting),
        }

    def metrics(self) -> Record:
        """Means over ranks."""
        return {
            "compute_s": round(mean(self.compute), 6),
            "communication_s": round(self.communication, 6),
            "waiting_s": round(mean(self.waiting), 6),
        }


def rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, 6) for each in seconds]


def split_times(compute: Sequence[float], blocked: Sequence[float]) -> RankTimes:
    """Times of ranks by what each has measured of itself."""
    communication = min(blocked)
    waiting = [each - communication for each in blocked]
    return RankTimes(list(compute), communication, waiting)


class SlowPlace(NamedTuple):
    """What holds up a run: a rank, or where `rank` is None a link; and how many times it takes as long. `links`: what a
    probe of all links has found, if anything stood out."""

    rank: int | None
    times: float
    links: SlowLinks | None = None

    def __str__(self) -> str:
        if self.rank is None:
            where = self.links.where if self.links else "a link"
            verb = "are" if where.startswith("the links") else "is"
            return f"{where} {verb} slow: communication takes {self.times:.3g} times as long as at first, on all ranks"
        return f"rank {self.rank} is slow: its compute takes {self.times:.3g} times as long as that of the others"

    def metrics(self) -> Record:
        if self.rank is not None:
            return {"slow_rank": self.rank}
        if self.links is None:
            return {"slow_rank": -1}
        first, second = self.links.slowest
        return {"slow_rank": -1, "slow_link_first": first, "slow_link_second": second}


class StragglerJudge:
    """Names a slow rank or link when it persists; `factor` 0: nobody is named."""

    def __init__(self, factor: float):
        self.factor = factor
        self.first_seconds: list[float] = []  # of communication, in the first windows
        self.suspect: SlowPlace | None = None
        self.windows = 0  # that the suspect has been seen

    def look(self, times: RankTimes) -> SlowPlace | None:
        """The slow place of a window, if it was the same in the windows before."""
        found = self.slowest(times)
        before = self.suspect
        same = found and before and found.rank == before.rank
        self.windows = self.windows + 1 if same else 1
        self.suspect = found
        return found if self.windows >= PERSISTS else None

    def slowest(self, times: RankTimes) -> SlowPlace | None:
        if not self.factor:
            return None
        rank, ratio = slowest_rank(times.compute)
        is_first = len(self.first_seconds) < PERSISTS
        if is_first:
            self.first_seconds.append(times.communication)
        if ratio >= self.factor:
            return SlowPlace(rank, ratio)
        growth = times.communication / max(median(self.first_seconds), 1e-6)
        if not is_first and growth >= LINK_FACTOR and times.communication > times.step / 2:
            return SlowPlace(None, growth)
        return None


def slowest_rank(compute: Sequence[float]) -> tuple[int, float]:
    """The rank with the longest compute, and its compute in medians of the others'."""
    longest = max(compute)
    rank = compute.index(longest)
    others = [*compute[:rank], *compute[rank + 1 :]]
    return rank, longest / max(median(others), 1e-6)


class TimesLog:
    """`times.jsonl`: the times of each rank, and what is slow."""

    def __init__(self, path: Path, last_kept: int):
        self.lines = JsonLines(path, last_kept)

    def write(self, step: int, times: RankTimes, slow: SlowPlace | None) -> None:
        record: dict[str, Any] = {"step": step, **times.as_record()}
        if slow is not None:
            record["slow"] = str(slow)
        self.lines.write(record)

    def close(self) -> None:
        self.lines.close()
