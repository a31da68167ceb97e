"""Requests to end a run before its last step: by a signal, or by what a rank's surroundings have come to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moefold.layout.spawn import handled_signals, signal_exit_code


@dataclass(frozen=True)
class StopRequest:
    """A request to stop: the reason, the exit code of the run, and whether a checkpoint is saved first."""

    reason: str
    exit_code: int
    saves: bool = True


class StopRequests(list[StopRequest]):
    """The stop requests of this rank, the first one first. `is_read`: a training loop looks at them after each step."""

    is_read = False


@contextmanager
def signals_as_requests(requests: StopRequests) -> Iterator[StopRequests]:
    """Signals become requests inside the block, upon which the loop saves and leaves after the current step. A second
    Ctrl-C leaves at once. A signal that is ignored stays so, such as SIGHUP under nohup."""

    def record_signal(number: int, _frame: object) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        code = signal_exit_code(number)
        requests.append(StopRequest(name, code))

    requests.is_read = True
    try:
        with handled_signals(record_signal):
            yield requests
    finally:
        requests.is_read = False
