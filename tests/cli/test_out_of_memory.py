"""A run that ends for want of memory tells what held it and which keys help, with an exit code of its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.fit_proposals import propose_changes
from moefold.plan.memory.machine_fit import MachineFit, ranks_of_machine
from moefold.presets.recipe import resolve_recipe

SIZES = ["--train.micro_batch", "16", "--train.global_batch", "16", "--data.seq_len", "16384", "--model.hidden", "1024"]


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))


def test_a_real_shortage_is_explained_and_has_exit_code_4(tmp_path: Path):
    words = ["train", "tiny", *SIZES, "--train.device", "cpu", "--data.tokenizer", "byte", "--force"]
    command = [sys.executable, "-m", "moefold", *words, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_memory, check=False)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "out of memory" in done.stderr
    assert "planned, GiB at the peak (backward of stage 0)" in done.stderr
    assert "by region, GiB, overlapping: layer" in done.stderr
    assert "what helps, each alone: " in done.stderr


def test_regions_are_proposed_where_they_make_a_run_fit():
    config = resolve_recipe("tiny", [*SIZES, "--train.device", "cpu", "--model.layers", "16"])
    ranks = ranks_of_machine(Rendezvous())
    kept, rebuilt = 200 * 2**30, 45 * 2**30
    for host in (kept, rebuilt):
        proposals = propose_changes(MachineFit(config, ranks, MachineMemory(host=host, gpus=())))
        assert any(text.startswith("--memory.recompute") for text in proposals)
