"""Killed ranks of a supervised run with checkpoints in memory, or on the disk alone: from where the run goes on, and
whether its losses are those of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moefold.checkpoint.keeper.files import KeeperAddress, keeper_name
from moefold.observe.metrics import read_records
from tests.support.launched import Launcher, has_steps, launched, small_ranks, wait_until
from tests.support.nodes import flip_kept_bits, keeper_processes
from tests.support.runs import numbers

STEPS = 40  # behind the last kill there are enough for a slow machine to kill in time
KEYS = ["--train.steps", str(STEPS), "--train.validate_every", str(STEPS)]
IN_MEMORY = ["--checkpoint.memory_every", "2", "--restarts", "2"]
DISK_EVERY = 10
SAVE_EVERY = 2
LONGEST_SAVE = 0.03  # seconds, of a small model
BETWEEN_SAVES = 15  # a step: memory has a later checkpoint than the disk
FIRST_KILL, LAST_KILL = 6, 20  # steps; behind the first of them a checkpoint is whole in memory
LONGEST_WAIT = 0.3  # seconds behind a step, which takes a tenth of one

Harm = Callable[[Launcher], None]


@dataclass(frozen=True)
class KilledRun:
    """A run that was killed and went on: `source` is memory or disk, at the step `resumed`."""

    killed_at: int
    source: str
    resumed: int
    disk_step: int
    same_losses: bool
    said: str

    @property
    def lost_steps(self) -> int:
        return self.killed_at - self.resumed

    @property
    def lost_from_disk(self) -> int:
        return self.killed_at - self.disk_step


@cache
def undisturbed_losses(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = small_ranks(folder, "b", ranks, *KEYS, "--checkpoint.every", "0")
        with launched(command, folder / "log") as launcher:
            assert launcher.wait() == 0, launcher.output()
        return numbers(folder / "b")


def kill_at_random(folder: Path, chance: random.Random, ranks: int) -> KilledRun:
    """Kill a random rank at a random moment of a run without checkpoints on the disk."""
    steps = chance.randint(FIRST_KILL, LAST_KILL)
    pause = chance.random() * LONGEST_WAIT
    rank = chance.randrange(ranks)

    def kill_one(launcher: Launcher) -> None:
        time.sleep(pause)
        os.kill(launcher.ranks()[rank], signal.SIGKILL)

    return disturbed_run(folder, ranks, 0, steps, kill_one)


def kill_last(launcher: Launcher) -> None:
    kill_all(launcher.ranks()[-1:])


def kill_one_rank(folder: Path, ranks: int) -> KilledRun:
    """Kill the last rank where memory has a later checkpoint than the disk."""
    return disturbed_run(folder, ranks, DISK_EVERY, BETWEEN_SAVES, kill_last)


def kill_without_keeper(folder: Path, ranks: int) -> KilledRun:
    """Kill the keeper, and the last rank when the run has noticed and the disk has a checkpoint."""

    def kill_both(launcher: Launcher) -> None:
        kill_all(keeper_processes(launcher.pid))
        assert wait_until(lambda: "no more checkpoints in memory" in launcher.output())
        assert wait_until(lambda: newest_on_disk(folder / "a") >= DISK_EVERY)
        kill_last(launcher)

    return disturbed_run(folder, ranks, DISK_EVERY, FIRST_KILL, kill_both)


def kill_with_harm(folder: Path, ranks: int, harm: Harm) -> KilledRun:
    """Harm the copy in memory while all ranks are stopped, then kill them."""

    def harm_and_kill(launcher: Launcher) -> None:
        stopped = launcher.ranks()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        harm(launcher)
        kill_all(stopped)

    return disturbed_run(folder, ranks, DISK_EVERY, BETWEEN_SAVES, harm_and_kill)


def kill_while_saving(folder: Path, chance: random.Random, ranks: int) -> KilledRun:
    """Kill one or all ranks in the middle of a save, in a run with checkpoints on the disk alone."""
    steps = chance.randint(FIRST_KILL, LAST_KILL)
    pause = chance.random() * LONGEST_SAVE
    number = chance.choice([1, ranks])

    def kill_in_save(launcher: Launcher) -> None:
        struck = False
        while not struck:  # a save that was over after the pause does not count
            assert wait_until(lambda: is_saving(folder / "a")), launcher.output()
            time.sleep(pause)
            alive = launcher.ranks()
            struck = is_saving(folder / "a")
        kill_all(chance.sample(alive, number))

    return disturbed_run(folder, ranks, SAVE_EVERY, steps, kill_in_save, ["--restarts", "2"])


def is_saving(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*.tmp"))


def kill_all(processes: list[int]) -> None:
    for pid in processes:
        os.kill(pid, signal.SIGKILL)


def disturbed_run(
    folder: Path,
    ranks: int,
    disk_every: int,
    steps: int,
    disturb: Harm,
    options: Sequence[str] = IN_MEMORY,
) -> KilledRun:
    """A run to its end that was disturbed behind some step, and behind the checkpoints on the disk before it."""
    out = folder / "a"
    keys = [*KEYS, *options, "--checkpoint.every", str(disk_every)]
    with launched(small_ranks(folder, "a", ranks, *keys), folder / "log") as launcher:
        assert wait_until(lambda: has_steps(out, steps)), launcher.output()
        disk_step = disk_every and steps // disk_every * disk_every
        assert wait_until(lambda: newest_on_disk(out) >= disk_step), launcher.output()
        disturb(launcher)
        assert launcher.wait() == 0, launcher.output()
    said = launcher.output()
    (source, step) = re.findall(r"resumed from (keepers:)?\S+ at step (\d+)", said)[-1]
    killed_at = read_records(out / "restarts.jsonl")[0]["step"] - 1
    same = numbers(out) == undisturbed_losses(ranks)
    return KilledRun(killed_at, "memory" if source else "disk", int(step), disk_step, same, said)


def newest_on_disk(out: Path) -> int:
    """The step of the newest checkpoint on the disk; 0 without one."""
    names = [path.name for path in (out / "checkpoints").glob("step-*") if not path.suffix]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def kill_keeper(launcher: Launcher) -> None:
    kill_all(keeper_processes(launcher.pid))


def flip_bits_of_keeper(launcher: Launcher) -> None:
    flip_kept_bits(KeeperAddress(keeper_name(launcher.pid)))


HARMS = {"keeper killed": kill_keeper, "bit of each kept file flipped": flip_bits_of_keeper}
