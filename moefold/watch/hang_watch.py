"""The watch over hangs: a rank that is too long in one phase raises an alarm, one rank reports, and all ranks end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from moefold.layout.environment import RANKS_FOLDER_VARIABLE, Rendezvous
from moefold.layout.process_groups import abort_communicators, connect_store
from moefold.layout.spawn import HANG_CODE, HANG_FILE
from moefold.watch.hang_report import HangReport, RankState, make_report, write_report
from moefold.watch.heartbeat import LEAST_PATIENCE, STORE_SECONDS, Heartbeat, state_of_this_rank, with_stacks
from moefold.watch.position import HERE, begin_run
from moefold.watch.time_limits import PhaseClock, TimeLimits

ABORT_SECONDS = 1.0


class HangWatch:
    """Looks at the time of this rank's phase, and ends the process when a limit has passed here or elsewhere."""

    def __init__(self, limits: TimeLimits, place: Rendezvous, run_folder: Path):
        self.limits = limits
        self.place = place
        self.run_folder = run_folder
        begin_run()
        self.clock = PhaseClock(HERE, time.monotonic())
        self.heartbeat: Heartbeat | None = None
        if place.size > 1:
            self.heartbeat = Heartbeat(place, connect_store, lambda: self.clock.seconds)
            self.heartbeat.thread.start()

    def end(self) -> None:
        """The run is over: a store that rank 0 serves may go now."""
        if self.heartbeat is not None:
            self.heartbeat.ended.set()
            self.heartbeat.thread.join(STORE_SECONDS)

    def look(self) -> None:
        seconds = self.clock.look(time.monotonic())
        limit = self.limits.of(HERE)
        if seconds > limit:
            key = self.limits.key_of(HERE)
            self.raise_alarm(f"{HERE} did not end within {limit:g} s ({key})")
        elif self.heartbeat and self.heartbeat.alarm_raised.is_set():
            self.raise_alarm("")

    def raise_alarm(self, why: str) -> None:
        """Report the hang if this rank is the first to see it, and end the process."""
        states = self.gather(why)
        if states is not None:
            why = (self.heartbeat and self.heartbeat.why) or why
            self.publish(make_report(why, states))
            self.let_others_end()
        abort_within(ABORT_SECONDS)
        os._exit(HANG_CODE)

    def gather(self, why: str) -> list[RankState] | None:
        """The states of all ranks; None where another rank reports. Of a store that does not answer nothing is known
        but this rank's own state."""
        seconds = self.clock.seconds
        if self.heartbeat is not None:
            self.heartbeat.own_alarm = why or None
            if self.heartbeat.await_answer():
                return self.heartbeat.states
        alone = state_of_this_rank(self.place.rank, 1, seconds)
        return [with_stacks(alone)]

    def let_others_end(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.published.set()
            self.heartbeat.thread.join(LEAST_PATIENCE)

    def publish(self, report: HangReport) -> None:
        try:
            write_report(report, self.run_folder)
            read = f"stacks: moefold doctor hang {self.run_folder}"
        except OSError as error:
            read = f"stacks could not be written to {self.run_folder}: {error.strerror}"
        more = "what was committed is safe: continue with --resume auto"
        show_summary(f"moefold: {report.summary()}\n{read}\n{more}\n", os.environ)


def show_summary(text: str, env: Mapping[str, str]) -> None:
    """Give the text to the launcher of `--nproc`, which prints it; elsewhere print it."""
    folder = env.get(RANKS_FOLDER_VARIABLE)
    if folder:
        Path(folder, HANG_FILE).write_text(text, encoding="utf-8")
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


def abort_within(seconds: float) -> None:
    """Abort communicators, in a thread: the call may itself wait for the device."""
    thread = threading.Thread(target=abort_communicators, daemon=True)
    thread.start()
    thread.join(seconds)
