"""Warm ranks: a supervised run outlives the starter that forks its ranks, and neither outlives the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from moefold.cli.chaos_job import child_processes, process_name
from moefold.layout.warm_ranks import STARTER_NAME
from moefold.observe.metrics import read_records
from tests.support.launched import Launcher, has_steps, is_alive, launched, small_ranks, wait_until

KEYS = ["--train.steps", "100000", "--train.validate_every", "100000", "--checkpoint.every", "0"]
SUPERVISED = ["--checkpoint.memory_every", "2", "--restarts", "3"]


def starter_of(launcher: Launcher) -> int:
    (starter,) = [child for child in child_processes(launcher.pid) if process_name(child) == STARTER_NAME]
    return starter


def test_a_lost_starter_costs_a_restart_and_a_lost_launcher_leaves_nobody(tmp_path: Path):
    out = tmp_path / "a"
    with launched(small_ranks(tmp_path, "a", 2, *KEYS, *SUPERVISED), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(out, 6)), launcher.output()
        first = [starter_of(launcher), *launcher.ranks()]
        assert [process_name(pid) for pid in first[1:]] == ["moefold-rank-0", "moefold-rank-1"]
        os.kill(first[0], signal.SIGKILL)
        assert wait_until(lambda: launcher.output().count("resumed from keepers:") == 1), launcher.output()
        assert not any(map(is_alive, first))
        (restart,) = read_records(out / "restarts.jsonl")
        assert wait_until(lambda: read_records(out / "metrics.jsonl")[-1]["step"] > restart["step"])
        second = [starter_of(launcher), *launcher.ranks()]
        assert len(second) == 3
        os.kill(launcher.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_alive, second)), 30)
