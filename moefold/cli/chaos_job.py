"""The job of `moefold doctor chaos`: a small supervised run in a folder of its own, to be disturbed and looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefold.config.errors import RunFailure
from moefold.layout.warm_ranks import STARTER_NAME
from moefold.observe.metrics import read_records
from moefold.watch.supervisor import FAULTS_FILE, RESTARTS_FILE

RANKS = 2
LOOK_SECONDS = 0.01
CORPUS_LINES = 3000
SAVE_EVERY = 5  # steps
# Steps of some milliseconds, with experts, checkpoints, and all that looks for faults.
SMALL_KEYS = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.moe.ffn": 32,
    "model.moe.experts": 4,
    "model.attention.heads": 2,
    "model.attention.kv_heads": 1,
    "model.attention.head_dim": 16,
    "data.source": "files",
    "data.seq_len": 32,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.validate_sequences": 8,
    "train.sample_tokens": 0,
    "train.device": "cpu",
    "train.precision": "fp32",
    "checkpoint.every": SAVE_EVERY,
    "checkpoint.keep": 4,
    "observe.tensorboard": False,
    "observe.compare_every": 2,
    "observe.times_every": 1,
}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")

Keys = Mapping[str, Any]


def write_corpus(folder: Path) -> Path:
    lines = [f"def f{i}(x):\n    return x * {i} + {i * i % 97}  # {i} of many\n" for i in range(CORPUS_LINES)]
    path = folder / "corpus.txt"
    path.write_text("\n".join(lines))
    return path


def train_words(out: Path, keys: Keys) -> list[str]:
    """The command line of a run."""
    words = ["train", "tiny", "--out", str(out), "--force"]
    for name, value in keys.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def start_command(words: Sequence[str], log: Path, more: Keys, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `moefold WORDS`, with more variables in its environment, as a process group of its own."""
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    command = [*prefix, sys.executable, "-m", "moefold", *words]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**env, "OMP_NUM_THREADS": "1", **more},
            process_group=0,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )


def rank_processes(launcher: int) -> list[int]:
    """Process numbers of a launcher's ranks, in order of rank; none where the run is between two starts."""
    ranks: list[int] = []
    for child in child_processes(launcher):
        is_starter = process_name(child) == STARTER_NAME
        ranks += child_processes(child) if is_starter else [child]
    return ranks


def child_processes(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in children.split()]


def process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class RunFiles:
    """What a run has written: its log, and the files of its folder."""

    def __init__(self, folder: Path):
        self.out = folder / "run"
        self.log = folder / "log"

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        return read_records(self.out / "metrics.jsonl")

    def step(self) -> int:
        """The last step that was recorded."""
        records = self.records()
        return records[-1]["step"] if records else -1

    def losses(self) -> list[tuple[Any, ...]]:
        return [(record["step"], record.get("loss"), record.get("val_loss")) for record in self.records()]

    def restarts(self) -> list[dict[str, Any]]:
        return read_records(self.out / RESTARTS_FILE)

    def faults(self) -> list[dict[str, Any]]:
        return read_records(self.out / FAULTS_FILE)


class RunningJob(RunFiles):
    """A run of several ranks, whose launcher is `process`."""

    process: subprocess.Popen[bytes]

    def ranks(self) -> list[int]:
        return rank_processes(self.process.pid)

    def close(self) -> None:
        """End what still runs. Ranks are killed first: one that is stopped does not see its launcher go."""
        if self.process.poll() is None:
            for pid in [*self.ranks(), self.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


class ChaosJob(RunningJob):
    """A supervised run of two ranks. `patience`: seconds until a run that does not end is given up."""

    def __init__(self, folder: Path, keys: Keys, patience: float, env: Keys | None = None):
        super().__init__(folder)
        folder.mkdir(parents=True)
        self.deadline = time.monotonic() + patience
        words = train_words(self.out, keys)
        self.process = start_command([*words, "--nproc", str(RANKS), "--restarts", "3"], self.log, env or {})

    def rank_process(self, rank: int) -> int:
        """The process of a rank, as soon as all ranks are there."""
        self.wait_until(lambda: len(self.ranks()) == RANKS, f"{RANKS} ranks")
        return self.ranks()[rank]

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what a run does; a run that ends before, or does not do it in time, is a failure."""
        while not condition():
            if self.process.poll() is not None and not condition():
                raise RunFailure(f"the run ended before {what}")
            if time.monotonic() > self.deadline:
                raise RunFailure(f"the run took too long for {what}")
            time.sleep(LOOK_SECONDS)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def finish(self) -> int:
        """Wait for the end of the run; its exit code."""
        self.wait_until(lambda: self.process.poll() is not None, "its end")
        code = self.process.poll()
        assert code is not None
        return code
