"""Clocks of the benchmarks: wall-clock seconds of a call, the median of synchronized calls, the time in which a call's
kernels ran, and the bandwidth of a copy, by which others are judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from moefold.bench.machine import synchronize_device
from moefold.observe.profile import profile_device

WARM_UP_CALLS = 3
PROFILED_CALLS = 3
COPIED_BYTES = 2**30  # of the copy that bandwidth is measured by, on a GPU
COPIED_BYTES_ON_CPU = 2**24
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


def busy_milliseconds(work: Work, device: torch.device, repeat: int = PROFILED_CALLS) -> float:
    """The least of several calls, each by the time in which kernels ran: launches take no part in it."""
    seconds: list[float] = []
    for _ in range(repeat):
        with profile_device(device) as read_profile:
            work()
        profile = read_profile()
        seconds.append(profile.busy_seconds)
    return min(seconds) * 1e3


def copy_bandwidth(device: str, repeat: int) -> float:
    """Bytes read plus bytes written by a copy, a second."""
    size = COPIED_BYTES if device == "cuda" else COPIED_BYTES_ON_CPU
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(partial(target.copy_, source), device, repeat)
    return 2 * size / seconds
