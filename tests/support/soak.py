"""A soak: four ranks train under `--restarts` with checkpoints in memory while one fault after another strikes them.

    python -m tests.support.soak --minutes 30               a fault a minute
    python -m tests.support.soak --minutes 0.5 --every 6    a short form, each fault once

Faults are drawn evenly: a rank killed; a rank stopped; a NaN in a gradient; a bit of every kept file flipped and all
ranks killed, so that the disk is read; the link between all ranks taken down until the run has noticed (root alone:
the soak moves into a network namespace of its own). Then the same run is trained undisturbed, as far.

Printed: what each fault cost, and the goodput: committed steps x median step time of the undisturbed run / wall time of
the disturbed one, starts included. A step's time is that of a turn of the loop, with reading of data and exchange but
without recording, as the ranks measure it over ten steps; ten steps with a checkpoint among them do not count. By the
recorded seconds of a step alone, its forward, backward and update, goodput is lower. The runs take place one after the
other: where other work comes and goes, the third figure, by the disturbed run's own median step, is the fairer one. The
exit code is 0 if all losses are those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from moefold.checkpoint.keeper.files import KeeperAddress, keeper_name
from moefold.cli.chaos_job import SMALL_KEYS, Keys, RunningJob, start_command, train_words, write_corpus
from moefold.observe.metrics import read_records
from moefold.observe.rank_times import TIMES_FILE, RankTimes
from tests.support.nodes import flip_kept_bits

RANKS = 4
KEYS: Keys = {
    **SMALL_KEYS,
    "train.steps": 1_000_000,
    "train.validate_every": 1_000_000,
    "checkpoint.every": 40,
    "checkpoint.memory_every": 20,
    "observe.compare_every": 0,
    "observe.times_every": 10,
}
NAN_PLACE = "blocks.1.moe.experts.down"
STEP_FILE = "fault-step"
STEPS_AHEAD = 3  # of the step in which a NaN comes, so that the file is read before it
PATIENCE = 120.0  # seconds for a run to go on after a fault
OWN_NETWORK = "--own-network"


class Soaked(RunningJob):
    """The job: a supervised run without an end."""

    def __init__(self, folder: Path, keys: Keys):
        super().__init__(folder)
        folder.mkdir(parents=True)
        words = [*train_words(self.out, keys), "--nproc", str(RANKS), "--restarts", "100000"]
        self.begun = time.monotonic()
        self.process = start_command(words, self.log, {})

    def await_all_ranks(self) -> list[int]:
        self.wait_until(lambda: len(self.ranks()) == RANKS)
        return self.ranks()

    def wait_until(self, condition: Callable[[], object], patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.said()[-2000:]}"
            assert time.monotonic() < deadline, f"the run does not go on: {self.said()[-2000:]}"
            time.sleep(0.01)

    def step(self) -> int:
        """The last recorded step, from the end of the file alone."""
        with suppress(OSError, ValueError), (self.out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            *_, last, _ = file.read().split(b"\n")
            return json.loads(last)["step"]
        return -1

    def end(self) -> float:
        """Ask the run to stop, which saves first; the seconds that it has had."""
        seconds = time.monotonic() - self.begun
        os.kill(self.process.pid, signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 143, self.said()[-2000:]
        return seconds


def kill_rank(job: Soaked, rank: int) -> None:
    os.kill(job.await_all_ranks()[rank], signal.SIGKILL)


def stop_rank(job: Soaked, rank: int) -> None:
    os.kill(job.await_all_ranks()[rank], signal.SIGSTOP)


def order_nan(job: Soaked, _rank: int) -> None:
    """A NaN some steps from now, on the rank of the order; the file goes before the run comes there again."""
    known = len(job.faults())
    (job.out / STEP_FILE).write_text(str(job.step() + STEPS_AHEAD))
    job.wait_until(lambda: len(job.faults()) > known)
    (job.out / STEP_FILE).unlink()


def damage_memory(job: Soaked, _rank: int) -> None:
    ranks = job.await_all_ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    flip_kept_bits(KeeperAddress(keeper_name(job.process.pid)))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def cut_link(job: Soaked, _rank: int) -> None:
    """Take the link down until a rank has reported that the run hangs."""
    reports = count_reports(job)
    set_link("down")
    try:
        job.wait_until(lambda: count_reports(job) > reports)
    finally:
        set_link("up")


def count_reports(job: Soaked) -> int:
    return len(list((job.out / "hangs").glob("*.json")))


def set_link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


FAULTS = {
    "kill": kill_rank,
    "stop": stop_rank,
    "nan": order_nan,
    "corrupted": damage_memory,
    "cut": cut_link,
}


def link_hindrance() -> str:
    """Why no link can be cut; empty where it can."""
    if os.geteuid():
        return "a network namespace needs root"
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing:
        return f"there is no command {' and '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


def drawn_faults(names: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Faults without an end, each kind once in every round."""
    while True:
        yield from chance.sample(names, len(names))


@dataclass
class SoakResult:
    steps: int
    wall: float
    step_seconds: float  # median, of the undisturbed run
    inner_seconds: float  # likewise, of forward, backward and update alone
    own_step_seconds: float  # median, of the disturbed run
    same_losses: bool
    stall: float  # share of the undisturbed run's time for which training waited for checkpoints in memory
    lost: dict[str, list[float]] = field(default_factory=dict)

    def goodput(self, step_seconds: float) -> float:
        return self.steps * step_seconds / self.wall


def disturb(job: Soaked, names: Sequence[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Bring faults about until the time is up and each has come; the seconds until the run got further than before."""
    chance = random.Random(options.seed)
    lost: dict[str, list[float]] = {name: [] for name in names}
    job.wait_until(lambda: job.step() > KEYS["checkpoint.every"])
    last = time.monotonic() + 60 * options.minutes
    moment = time.monotonic() + options.every / 2
    for name in drawn_faults(names, chance):
        if moment > last and all(lost.values()):
            break
        time.sleep(max(0.0, moment - time.monotonic()))
        begun = time.monotonic()
        reached = job.step()
        restarts = len(job.restarts())
        FAULTS[name](job, chance.randrange(RANKS))
        job.wait_until(lambda known=restarts: len(job.restarts()) > known)
        named = time.monotonic() - begun
        job.wait_until(lambda step=reached: job.step() > step + STEPS_AHEAD)
        lost[name].append(time.monotonic() - begun)
        cause = job.restarts()[-1]["cause"]
        print(f"{name} at step {reached}: restart {named:.1f} s, {lost[name][-1]:.1f} s lost: {cause:.110}", flush=True)
        moment = max(moment + options.every, time.monotonic())
    time.sleep(max(0.0, last - time.monotonic()))
    return lost


def soak(folder: Path, names: Sequence[str], options: argparse.Namespace) -> SoakResult:
    keys = {**KEYS, "data.files": str(write_corpus(folder)), "train.step_timeout": options.step_timeout}
    rank = random.Random(options.seed).randrange(RANKS)
    order = f"nan gradient={NAN_PLACE} rank={rank} at={STEP_FILE}"
    with closing(Soaked(folder / "disturbed", {**keys, "observe.fault": order})) as job:
        lost = disturb(job, names, options)
        wall = job.end()
        steps = job.step()
        losses = job.losses()
        own_seconds = median_step(job)
    with closing(Soaked(folder / "undisturbed", keys)) as calm:
        calm.wait_until(lambda: calm.step() >= steps, patience=10 * wall)
        calm.end()
    records = [record for record in calm.records() if 0 < record["step"] <= steps]
    expected = [entry for entry in calm.losses() if entry[0] <= steps]
    waited = sum(record.get("copy_wait_s", 0.0) for record in records)
    stall = waited / sum(record["seconds"] for record in records)
    inner = median(record["seconds"] for record in records)
    return SoakResult(steps, wall, median_step(calm), inner, own_seconds, losses == expected, stall, lost)


def median_step(job: Soaked) -> float:
    """By windows of steps before which no checkpoint began."""
    seconds: list[float] = []
    for window in read_records(job.out / TIMES_FILE):
        if window["step"] % KEYS["checkpoint.memory_every"] == 0:
            times = RankTimes(window["compute"], window["communication"], window["waiting"])
            seconds.append(times.step)
    return median(seconds)


def report(result: SoakResult, skipped: dict[str, str], options: argparse.Namespace) -> None:
    for name, seconds in result.lost.items():
        if seconds:
            print(f"{name}: {len(seconds)} times, {median(seconds):.1f} s in the middle, {max(seconds):.1f} s at most")
    for name, reason in skipped.items():
        print(f"{name}: skipped: {reason}")
    faults = sum(map(len, result.lost.values()))
    losses = "all losses are those of the undisturbed run" if result.same_losses else "OTHER LOSSES"
    print(
        f"{faults} faults in {result.wall:.0f} s; {result.steps} steps of {1e3 * result.step_seconds:.1f} ms; {losses}"
    )
    print(f"undisturbed, training waited {result.stall:.2%} of its time for checkpoints in memory")
    inner, own = result.inner_seconds, result.own_step_seconds
    print(f"by forward, backward and update alone, {1e3 * inner:.1f} ms: goodput {result.goodput(inner):.3f}")
    print(f"by its own median step of {1e3 * own:.1f} ms: goodput {result.goodput(own):.3f}")
    print(f"goodput {result.goodput(result.step_seconds):.3f}; seed {options.seed}")


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from fault to fault")
    parser.add_argument("--step-timeout", type=float, default=1.2, help="seconds; short for a machine of its own")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(OWN_NETWORK, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = read_arguments(argv)
    names: list[str] = options.faults.split(",")
    hindrance = link_hindrance()
    if "cut" in names and not hindrance and not options.own_network:
        again = [sys.executable, "-m", "tests.support.soak", *argv, OWN_NETWORK]
        return subprocess.run(["unshare", "--net", *again]).returncode
    skipped: dict[str, str] = {}
    if "cut" in names and hindrance:
        names.remove("cut")
        skipped["cut"] = hindrance
    if options.own_network:
        set_link("up")
    with tempfile.TemporaryDirectory(prefix="moefold-soak-") as folder:
        result = soak(Path(folder), names, options)
    report(result, skipped, options)
    return 0 if result.same_losses else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
