"""Clocks of the benchmarks: wall-clock seconds of a call, and the median of synchronized calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from moefold.bench.machine import synchronize_device

WARM_UP_CALLS = 3
Work = Callable[[], Any]  # a call to be timed


def wall_clock_seconds(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def median_seconds(work: Work, device: str, repeat: int) -> float:
    """Median of `repeat` calls, each from an idle device to an idle device, after some to warm up."""

    def synchronized_call() -> None:
        work()
        synchronize_device(device)

    synchronize_device(device)
    calls = range(WARM_UP_CALLS + repeat)
    times = [wall_clock_seconds(synchronized_call) for _ in calls]
    return median(times[WARM_UP_CALLS:])
