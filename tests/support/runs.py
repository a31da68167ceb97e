"""Whole runs through the command line's own entry, in processes forked warm, so that they can be killed for real."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import CONTEXT

# A model small enough for a step to take some milliseconds, with every mechanism of `tiny`.
SMALL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.moe.ffn", "32", "--model.moe.experts", "4"),
    *("--model.attention.heads", "2", "--model.attention.kv_heads", "1", "--model.attention.head_dim", "16"),
    *("--data.seq_len", "32", "--train.global_batch", "8", "--train.micro_batch", "2"),
    *("--train.validate_sequences", "8", "--train.sample_tokens", "8", "--observe.tensorboard", "false"),
]


def start(argv: Sequence[str], log: Path, env: dict[str, str] | None = None):
    """`moefold ARGV` in a process of its own; its output goes to `log`."""
    process = CONTEXT.Process(target=be_command, args=(list(argv), str(log), env or {}))
    process.start()
    return process


def be_command(argv: list[str], log: str, env: dict[str, str]) -> None:
    import torch

    from moefold.cli.main import run_command_line

    os.environ.update(env)
    torch.set_num_threads(1)
    with open(log, "w", buffering=1) as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run_command_line(argv)
    sys.exit(code)


def command(argv: Sequence[str], log: Path, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Run to the end: exit code and output."""
    process = start(argv, log, env)
    process.join(120)
    return process.exitcode, log.read_text()


def corpus(folder: Path) -> list[str]:
    """A little text of one's own: quicker to read than the standard library, and the same on every machine."""
    text = "\n".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}  # the {i}th of many\n" for i in range(3000))
    path = folder / "corpus.txt"
    path.write_text(text)
    return ["--data.source", "files", "--data.files", str(path)]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


TIMES = (
    *("tokens_per_s", "tflops", "seconds", "memory_gib", "copy_wait_s"),
    *("compute_s", "communication_s", "waiting_s", "slow_rank", "slow_link_first", "slow_link_second"),
)


def numbers(out: Path) -> list[dict[str, Any]]:
    """What a run measured, without what the clock and the machine measured."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(out)]
