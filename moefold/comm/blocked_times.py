"""Blocked time of this rank: inside collectives, and until those end that run concurrently with compute.

Time of threads beside the step does not count: the comm lane works while the compute lane does, and a saver is no part
of a step. On a GPU time stamps are events of the stream, which nobody waits for; several GPUs were never run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefold.comm.host_copies import DeviceTime


class TimeSpan:
    """A span of a device's time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begun = DeviceTime(device)
        self.ended = self.begun

    def end(self) -> None:
        self.ended = DeviceTime(self.device)

    @property
    def seconds(self) -> float:
        return self.begun.seconds_until(self.ended)


class TimedStep(TimeSpan):
    """A step, with the spans in which it was blocked."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.blocked: list[TimeSpan] = []
        self.is_blocked = False

    @property
    def blocked_seconds(self) -> float:
        return sum(span.seconds for span in self.blocked)


STEPS_BEING_TIMED: list[TimedStep] = []


@contextmanager
def timed_step(device: torch.device) -> Iterator[TimedStep]:
    """Time what is inside the block, and how long it is blocked."""
    step = TimedStep(device)
    STEPS_BEING_TIMED.append(step)
    try:
        yield step
    finally:
        STEPS_BEING_TIMED.remove(step)
        step.end()


@contextmanager
def blocked() -> Iterator[None]:
    """What is inside the block waits for other ranks."""
    step = STEPS_BEING_TIMED[-1] if STEPS_BEING_TIMED else None
    if step is None or step.is_blocked or not is_thread_of_step():
        yield
        return
    span = TimeSpan(step.device)
    step.is_blocked = True
    try:
        yield
    finally:
        step.is_blocked = False
        span.end()
        step.blocked.append(span)


def is_thread_of_step() -> bool:
    """Whether this is the main thread, or a thread of autograd, which Python did not start."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread.name.startswith("Dummy")
