"""`moefold doctor chaos`: a small supervised run is disturbed by one fault after another, and compared with an
undisturbed run. The table has what was seen of each fault, how soon, what it cost, and whether the losses are the same.

Exit code 0 if every fault was survived that can be had on this machine, else 1.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from moefold.cli.chaos_faults import MACHINE_FAULTS, FaultPlan, MachineFault
from moefold.cli.chaos_job import SAVE_EVERY, SMALL_KEYS, ChaosJob, Keys, RunFiles, write_corpus
from moefold.cli.chaos_links import LINK_FAULTS, LinkedJob, link_hindrance
from moefold.config.errors import RunFailure, UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.printable import printable_text

LEAST_STEPS = 6 * SAVE_EVERY
FAULT_NAMES = (*MACHINE_FAULTS, *LINK_FAULTS)


@dataclass(frozen=True)
class ChaosOptions:
    """Disturb a small supervised run by faults, one after another, and see what it survives: kill, stop, slow, nan,
    flip, file, clock, disk, memory, cut, link."""

    faults: str = "all"
    """Faults to bring about, separated by commas; all: every one."""
    steps: int = 60
    """Steps of the run."""
    seconds: float = 300.0
    """How long each run may take."""
    timeout: float = 10.0
    """Seconds that a step may take before the run is held for hanging (train.step_timeout)."""
    seed: int | None = None
    """Seed of ranks, steps and bits; by default a new one, which is printed."""


FORM = CommandForm("doctor chaos", ChaosOptions)


class FaultOutcome(NamedTuple):
    """What became of a fault. `within`: seconds from the fault until it was named; None where it is not to be named, or
    was not."""

    fault: str
    seen: str
    within: float | None = None
    lost: int = 0
    is_equal: bool = False
    is_skipped: bool = False
    code: int | None = None

    @property
    def is_survived(self) -> bool:
        return self.code == 0 and self.is_equal

    def cells(self) -> list[str]:
        if self.is_skipped:
            return [self.fault, self.seen, "", "", "", "skipped"]
        within = "" if self.within is None else f"{self.within:.1f} s"
        equal = "equal" if self.is_equal else "NOT equal"
        survived = "yes" if self.is_survived else "NO"
        return [self.fault, self.seen, within, str(self.lost), equal, survived]


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    names = chosen_faults(options)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="moefold-chaos-"))
    print(f"seed {seed}; {', '.join(names)}; runs are in {folder}", flush=True)
    try:
        outcomes = ChaosTrials(options, folder, seed).run(names)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    Console().print(outcome_table(outcomes))
    tried = [outcome for outcome in outcomes if not outcome.is_skipped]
    failed = [outcome.fault for outcome in tried if not outcome.is_survived]
    if failed:
        print(f"NOT survived: {', '.join(failed)}; the runs are left in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(tried)} of {len(tried)} faults survived")
    return 0


def chosen_faults(options: ChaosOptions) -> list[str]:
    if options.steps < LEAST_STEPS:
        raise UserError(f"--steps {options.steps} leaves no room for a fault; expected {LEAST_STEPS} or more")
    if options.faults == "all":
        return list(FAULT_NAMES)
    names = [name.strip() for name in options.faults.split(",")]
    for name in names:
        if name not in FAULT_NAMES:
            known = ", ".join(FAULT_NAMES)
            raise UserError(f'--faults has "{printable_text(name)}"; expected all, or some of {known}')
    return names


class ChaosTrials:
    """Runs of one seed, each in a folder of its own."""

    def __init__(self, options: ChaosOptions, folder: Path, seed: int):
        self.options = options
        self.folder = folder
        self.seed = seed
        self.keys: dict[str, Any] = {
            **SMALL_KEYS,
            "data.files": str(write_corpus(folder)),
            "train.steps": options.steps,
            "train.validate_every": options.steps,
            "train.step_timeout": options.timeout,
            "observe.slow_rank": 4,
        }
        self.undisturbed: list[tuple[Any, ...]] = []

    def run(self, names: Sequence[str]) -> list[FaultOutcome]:
        with closing(ChaosJob(self.folder / "undisturbed", self.keys, self.options.seconds)) as job:
            if job.finish() != 0:
                raise RunFailure(f"the undisturbed run failed; its last words: {job.said()[-500:]}")
            self.undisturbed = job.losses()
        outcomes: list[FaultOutcome] = []
        for name in names:
            print(f"{name} ...", flush=True)
            outcomes.append(self.try_fault(name))
        return outcomes

    def try_fault(self, name: str) -> FaultOutcome:
        """One fault. The draw depends on seed and name alone, not on what was tried before."""
        chance = random.Random(f"{self.seed} {name}")
        hindrance = link_hindrance() if name in LINK_FAULTS else MACHINE_FAULTS[name].hindrance()
        if hindrance:
            return FaultOutcome(name, hindrance, is_skipped=True)
        folder = self.folder / name
        try:
            if name in LINK_FAULTS:
                return self.try_link(name, folder)
            return self.try_on_machine(name, MACHINE_FAULTS[name], folder, chance)
        except RunFailure as failure:
            return FaultOutcome(name, f"{failure}; {last_line(RunFiles(folder))}")

    def try_on_machine(self, name: str, kind: MachineFault, folder: Path, chance: random.Random) -> FaultOutcome:
        plan = kind.draw(chance, self.options.steps)
        with kind.surroundings(folder) as place:
            keys: Keys = {**self.keys, **plan.keys, **place}
            with closing(ChaosJob(folder, keys, self.options.seconds, plan.env)) as job:
                within = disturb(job, plan)
                code = job.finish()
        return self.outcome(name, job, what_was_seen(job, plan), within, code)

    def try_link(self, name: str, folder: Path) -> FaultOutcome:
        fault = LINK_FAULTS[name]
        with closing(LinkedJob(folder, self.keys, self.options.seconds)) as job:
            job.wait_for_step(2 * SAVE_EVERY)
            begun = time.monotonic()
            fault.disturb(job.link)
            seen = job.wait_for_sign(fault.sign)
            within = time.monotonic() - begun
            fault.restore(job.link)
            code = job.finish()
        return self.outcome(name, job, seen, within, code)

    def outcome(self, name: str, job: RunFiles, seen: str, within: float | None, code: int) -> FaultOutcome:
        is_equal = job.losses() == self.undisturbed
        return FaultOutcome(name, seen, within, steps_lost(job), is_equal, code=code)


def disturb(job: ChaosJob, plan: FaultPlan) -> float | None:
    """Bring a fault about; seconds until the run has named it, None where it has nothing to name."""
    job.wait_for_step(plan.step - 1)
    begun = time.monotonic()
    plan.inject(job)
    if not plan.sign:
        return None
    job.wait_until(lambda: plan.sign in everything_said(job), f'it said "{plan.sign}"')
    within = time.monotonic() - begun
    plan.relieve(job)
    return within


def everything_said(job: RunFiles) -> str:
    causes = [str(record.get("cause")) for record in job.restarts()]
    return "\n".join([job.said(), *causes])


def what_was_seen(job: RunFiles, plan: FaultPlan) -> str:
    """The line of the log that names the fault; for one that is not to be named, that nothing was."""
    restarts = job.restarts()
    if not plan.sign:
        causes = [str(record.get("cause")) for record in restarts]
        return "; ".join(causes) or "nothing, as it should be"
    if plan.sign.startswith("restart "):
        return str(restarts[0].get("cause"))
    for line in everything_said(job).splitlines():
        if plan.sign in line:
            return shortened(line, plan.sign)
    return ""


def shortened(line: str, sign: str) -> str:
    """The part of a long line that names the fault."""
    begin = line.index(sign)
    end = min((place for mark in (";", ". ") if (place := line.find(mark, begin)) > 0), default=len(line))
    return printable_text(line[begin:end])


def steps_lost(job: RunFiles) -> int:
    """Steps that were done twice: from where the run resumed to the last that was recorded before each restart."""
    lost = 0
    resumed = [line for line in job.said().splitlines() if line.startswith("resumed from")]
    for record, line in zip(job.restarts(), resumed, strict=False):
        step = int(line.rpartition(" ")[2])
        lost += max(0, record["step"] - 1 - step)
    return lost


def last_line(job: RunFiles) -> str:
    lines = job.said().strip().splitlines()
    return printable_text(lines[-1]) if lines else ""


def outcome_table(outcomes: Sequence[FaultOutcome]) -> Table:
    table = Table("fault", "seen", "named within", "steps lost", "losses", "survived", title_justify="left")
    for outcome in outcomes:
        table.add_row(*outcome.cells())
    return table
