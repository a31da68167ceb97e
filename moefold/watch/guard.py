"""The guard of a rank: a thread that looks, a few times a second, at the rank's surroundings and at the time that its
phase takes, and asks the run to stop.

While a training loop runs, a request ends it after the current step, on all ranks alike, with a checkpoint. Before and
after the loop there is nothing to save: the process ends at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moefold.watch.stop_requests import StopRequest, StopRequests
from moefold.watch.surroundings import Check, launcher_check, unread_output_dropped

LOOK_SECONDS = 0.25


class RankGuard:
    def __init__(self, checks: list[Check]):
        self.checks = checks
        self.looks: list[Callable[[], None]] = []  # called at every look
        self.requests = StopRequests()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look_until_ended, daemon=True, name="guard")

    def look_until_ended(self) -> None:
        while not self.ended.wait(LOOK_SECONDS):
            for look in self.looks:
                look()
            for check in list(self.checks):
                request = check()
                if request is not None:
                    self.checks.remove(check)  # a request is made once
                    self.ask_to_stop(request)

    def ask_to_stop(self, request: StopRequest) -> None:
        if not self.requests.is_read:
            os._exit(request.exit_code)
        self.requests.append(request)


@contextmanager
def guarded_rank() -> Iterator[RankGuard]:
    """The guard of this process, looking at its launcher and its output; more checks can be added."""
    checks = [launcher_check(os.environ)]
    with unread_output_dropped() as output_check:
        if output_check is not None:
            checks.append(output_check)
        guard = RankGuard(checks)
        guard.thread.start()
        try:
            yield guard
        finally:
            guard.ended.set()
            guard.thread.join()
