"""Faults of `moefold doctor chaos` on one machine: how each is brought about, and what a run must say of it.

Nothing of the machine itself is touched: signals go to the job's own ranks, the full disk is a small tmpfs, the clock
is that of one rank's process, the limit of memory that of one rank.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from moefold.cli.chaos_job import RANKS, SAVE_EVERY, ChaosJob, Keys
from moefold.config.errors import RunFailure

DISK_BYTES = 24 << 20
SMALLEST_MAPPING = 16 << 10  # bytes from which the C library asks the system for memory, and gives it back
FILLER = "filler"


@dataclass(frozen=True)
class FaultPlan:
    """A fault that was drawn: of which rank, at which step. `keys` and `env`: of the job; `inject`: what is done from
    outside when the step is there; `sign`: what the run must say, in its log or its files; `relieve`: what is done when
    it was said."""

    rank: int
    step: int
    sign: str
    keys: Keys = field(default_factory=dict)
    env: Keys = field(default_factory=dict)
    inject: Callable[[ChaosJob], None] = lambda _: None
    relieve: Callable[[ChaosJob], None] = lambda _: None


DrawFault = Callable[[random.Random, int], FaultPlan]
Surroundings = Callable[[Path], AbstractContextManager[Keys]]  # of a job, by its folder; with the keys that lead there


def no_surroundings(_folder: Path) -> AbstractContextManager[Keys]:
    return nullcontext({})


@dataclass(frozen=True)
class MachineFault:
    """A kind of fault. `hindrance`: why it cannot be had here; empty where it can."""

    draw: DrawFault
    hindrance: Callable[[], str] = lambda: ""
    surroundings: Surroundings = no_surroundings


def draw_place(chance: random.Random, steps: int) -> tuple[int, int]:
    """A rank, and a step behind the first checkpoints, with as many steps to come."""
    first = 2 * SAVE_EVERY + 1
    return chance.randrange(RANKS), chance.randrange(first, max(first + 1, steps // 2))


def draw_kill(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)
    return FaultPlan(rank, step, f"rank {rank} was killed by SIGKILL", inject=lambda job: kill_rank(job, rank))


def kill_rank(job: ChaosJob, rank: int) -> None:
    os.kill(job.rank_process(rank), signal.SIGKILL)


def draw_stop(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)

    def stop_rank(job: ChaosJob) -> None:
        os.kill(job.rank_process(rank), signal.SIGSTOP)

    return FaultPlan(rank, step, f"rank {rank} does not answer", inject=stop_rank)


# ---- faults that a rank does to itself


def ordered(rank: int, step: int, fault: str, sign: str) -> FaultPlan:
    order = f"{fault} rank={rank} step={step}"
    return FaultPlan(rank, step, sign, {"observe.fault": order})


def draw_slow(chance: random.Random, steps: int) -> FaultPlan:
    rank, _ = draw_place(chance, steps)
    return ordered(rank, steps - 6, "slow times=12", f"rank {rank} is slow")


def draw_nan(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)
    layer = chance.randrange(2)
    name = f"blocks.{layer}.moe.experts.down"
    found = f"NaN in gradient {name}, layer {layer}, expert 0, rank {rank}"
    return ordered(rank, step, f"nan gradient={name} once", found)


def draw_flip(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)
    bit = chance.randrange(24)
    return ordered(rank, step, f"flip weight=head.norm.weight bit={bit} once", f"weights of rank {rank} differ")


def draw_clock(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)
    seconds = chance.choice((-86_400, 86_400))
    return ordered(rank, step, f"clock seconds={seconds}", "")


# ---- a damaged checkpoint


def draw_file(chance: random.Random, steps: int) -> FaultPlan:
    """A bit of the newest checkpoint flips, and then a rank is killed, so that the checkpoint is wanted."""
    rank, step = draw_place(chance, steps)

    def damage_and_kill(job: ChaosJob) -> None:
        process = job.rank_process(rank)
        os.kill(process, signal.SIGSTOP)  # no newer checkpoint is written meanwhile
        flip_in_newest(job.out / "checkpoints", chance)
        os.kill(process, signal.SIGKILL)

    return FaultPlan(rank, step, "is damaged", inject=damage_and_kill)


def flip_in_newest(checkpoints: Path, chance: random.Random) -> None:
    newest = max(checkpoints.glob("step-????????"))
    files = sorted(newest.glob("*.safetensors"))
    path = chance.choice(files)
    raw = bytearray(path.read_bytes())
    place = chance.randrange(len(raw) // 2, len(raw))  # behind the header
    raw[place] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


# ---- a full disk


def mount_hindrance() -> str:
    if os.geteuid():
        return "mounting a small tmpfs needs root"
    return "" if shutil.which("mount") else "there is no command mount"


@contextmanager
def small_disk(folder: Path) -> Iterator[Keys]:
    """A disk of a few MiB for checkpoints."""
    place = folder.with_name(f"{folder.name}-disk")
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise RunFailure(f"a tmpfs could not be mounted: {mounted.stderr.strip()}")
    try:
        yield {"checkpoint.path": str(place)}
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def draw_disk(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)

    def filler_of(job: ChaosJob) -> Path:
        folder = job.out.parent
        return folder.with_name(f"{folder.name}-disk") / FILLER

    def fill(job: ChaosJob) -> None:
        path = filler_of(job)
        free = shutil.disk_usage(path.parent).free
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)

    def empty(job: ChaosJob) -> None:
        filler_of(job).unlink()

    return FaultPlan(rank, step, "was not written", inject=fill, relieve=empty)


# ---- out of memory


def draw_memory(chance: random.Random, steps: int) -> FaultPlan:
    rank, step = draw_place(chance, steps)

    def limit_memory(job: ChaosJob) -> None:
        process = job.rank_process(rank)
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))

    env = {"MALLOC_MMAP_THRESHOLD_": str(SMALLEST_MAPPING)}
    return FaultPlan(rank, step, "restart 1 of", env=env, inject=limit_memory)


MACHINE_FAULTS = {
    "kill": MachineFault(draw_kill),
    "stop": MachineFault(draw_stop),
    "slow": MachineFault(draw_slow),
    "nan": MachineFault(draw_nan),
    "flip": MachineFault(draw_flip),
    "file": MachineFault(draw_file),
    "clock": MachineFault(draw_clock),
    "disk": MachineFault(draw_disk, mount_hindrance, small_disk),
    "memory": MachineFault(draw_memory),
}
