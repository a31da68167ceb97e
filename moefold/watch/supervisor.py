"""Supervised runs (`--restarts N`): a run that ends by a fault is started again from its newest sound checkpoint.

A run that has got further since the fault before is started again at once. One that has not waits before, twice as long
each time. The supervisor gives up when restarts are used up, or when the same step has failed twice for the same
reason: a fault of the data, the code or the settings comes again. Each restart has a
line in `restarts.jsonl` of the run's folder, with its cause. Runs that end by a request (a signal, closed output) or by
input that must change (exit code 2) are not started again.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moefold.layout.spawn import ENDING_SIGNALS, RanksEnd, handled_signals, signal_exit_code
from moefold.observe.metrics import last_step, read_records

RESTARTS_FILE = "restarts.jsonl"
FAULTS_FILE = "faults.jsonl"
FIRST_PAUSE = 1.0  # seconds
FIRST_STEP = 1
LONGEST_PAUSE = 60.0
INPUT_CODE = 2
CLOSED_OUTPUT_CODE = 141
DAMAGING_CAUSES = ("not finite", "replicas differ")  # checkpoints before may hold what these have come from

LaunchRanks = Callable[[str | None], RanksEnd]  # with what --resume says
ChooseCheckpoint = Callable[[bool], str | None]  # whether values are to be looked at; None: no checkpoint is sound


class RunFault(NamedTuple):
    """Why a run has ended, at which step. `is_damage`: values were wrong, perhaps in checkpoints too."""

    step: int
    cause: str
    is_damage: bool = False

    def repeats(self, before: RunFault | None) -> bool:
        """Whether this is the fault before once more. Numbers in a cause (ranks, processes, seconds) may differ."""
        if before is None or self.step != before.step:
            return False
        return re.sub(r"\d+", "", self.cause) == re.sub(r"\d+", "", before.cause)


class RestartPauses:
    """Seconds before each restart: none behind progress, else twice as long each time."""

    def __init__(self):
        self.furthest = FIRST_STEP
        self.without_progress = 0

    def after(self, step: int) -> float:
        """The pause after a fault at a step."""
        if step > self.furthest:
            self.furthest = step
            self.without_progress = 0
            return 0.0
        pause = FIRST_PAUSE * 2**self.without_progress
        self.without_progress += 1
        return min(LONGEST_PAUSE, pause)


class Supervisor:
    def __init__(self, launch: LaunchRanks, choose: ChooseCheckpoint, out: Path, restarts: int):
        self.launch = launch
        self.choose = choose
        self.out = out
        self.restarts = restarts

    def run(self, resume: str | None) -> int:
        """Run until the run ends by itself or has to be given up; its exit code."""
        before: RunFault | None = None
        pauses = RestartPauses()
        for restart in range(1, self.restarts + 2):
            faults = len(read_records(self.out / FAULTS_FILE))
            ended = self.launch(resume)
            if not is_fault(ended.code):
                return ended.code
            fault = self.read_fault(ended, faults)
            resume = self.choose(fault.is_damage)
            hindrance = self.reason_to_give_up(fault, before, restart, resume)
            if hindrance:
                self.note(fault, ended.code, gave_up=hindrance)
                print(f"gave up: {hindrance}; step {fault.step}: {fault.cause}", file=sys.stderr)
                return ended.code
            pause = pauses.after(fault.step)
            self.note(fault, ended.code, restart=restart, resume=resume, pause=pause)
            when = f"in {pause:g} s" if pause else "at once"
            again = f"restart {restart} of {self.restarts} {when}, --resume {resume}"
            print(f"{again}; step {fault.step}: {fault.cause}", file=sys.stderr, flush=True)
            stopped_by = interruptible_pause(pause)
            if stopped_by is not None:
                return signal_exit_code(stopped_by)
            before = fault
        raise AssertionError("the last restart ends above")

    def read_fault(self, ended: RanksEnd, known: int) -> RunFault:
        """The fault that has ended the run: as the run has logged it behind the `known` ones, or how its first rank
        ended, at the step behind the last one that was recorded."""
        logged = read_records(self.out / FAULTS_FILE)[known:]
        if logged:
            record = logged[-1]
            cause = str(record.get("cause"))
            return RunFault(record["step"], f"{cause}: {record.get('what')}", cause in DAMAGING_CAUSES)
        step = last_step(self.out / "metrics.jsonl")
        return RunFault(step + 1, ended.cause)

    def reason_to_give_up(self, fault: RunFault, before: RunFault | None, restart: int, resume: str | None) -> str:
        if fault.repeats(before):
            return "the same step has failed twice for the same reason"
        if restart > self.restarts:
            return f"{self.restarts} restarts are used up"
        if resume is None:
            return "no checkpoint of the run is sound"
        return ""

    def note(self, fault: RunFault, code: int, **more: Any) -> None:
        """Write a line about a fault. A run may fail before it has a folder."""
        if not self.out.is_dir():
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        line = json.dumps({"step": fault.step, "cause": fault.cause, "code": code, "time": when, **more})
        with (self.out / RESTARTS_FILE).open("a") as log:
            log.write(f"{line}\n")


def is_fault(code: int) -> bool:
    """Whether a run that ended with this code is to be started again."""
    asked = [signal_exit_code(number) for number in ENDING_SIGNALS]
    return code not in (0, INPUT_CODE, CLOSED_OUTPUT_CODE, *asked)


def interruptible_pause(seconds: float) -> int | None:
    """Wait; the signal that has ended the wait, if any."""
    stop = threading.Event()
    heard: list[int] = []

    def note_signal(number: int, _frame: object) -> None:
        heard.append(number)
        stop.set()

    with handled_signals(note_signal):
        stop.wait(seconds)
    return heard[0] if heard else None
