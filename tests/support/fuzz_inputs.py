"""Odd inputs in large numbers: each must end in an answer or a refusal, never in another exception.

    python -m tests.support.fuzz_inputs words --cases 10000         command lines of commands that train nothing
    python -m tests.support.fuzz_inputs shell --cases 200           likewise, each through a shell
    python -m tests.support.fuzz_inputs configs --cases 1000        YAML files
    python -m tests.support.fuzz_inputs checkpoints --cases 500     checkpoints with changed and resealed JSON
    python -m tests.support.fuzz_inputs data --cases 1000           files of data of every kind, prepared folders
    python -m tests.support.fuzz_inputs models --cases 300          folders of Hugging Face models
    python -m tests.support.fuzz_requests --cases 300               requests to `moefold web`

Printed: the seed, every case that failed with its number, and the largest memory of the process. The exit code is the
number of failed cases, at most 100.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from moefold.checkpoint.format.manifest import MANIFEST_FILE, DamagedCheckpoint, seal_manifest, unseal_manifest
from moefold.checkpoint.format.verify import require_run_position, verify_checkpoint
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.keys import iterate_keys
from moefold.config.run import Config
from moefold.presets.recipe import resolve_recipe
from tests.support.fuzz_files import fuzz_data, fuzz_model
from tests.support.odd_bytes import change_somewhere

KEYS = [key.path for key in iterate_keys(Config())]
COMMANDS = ["explain", "presets", "simulate", "ckpt", "report", "convert", "trian", "--version", "", "doctor hang"]
ROOT = Path(__file__).parents[2]
SHELL_SECONDS = 60.0
ODD_VALUES = ["", "-1", "0", "1e999", "nan", "9" * 5000, "0" * 5000 + "1", "\x1b[2J", "\ud800", "true", "[", "{", "a,b"]
ODD_VALUES += ["*", "&a", "<<", "!!python/object:os.system", "../../etc/passwd", "/dev/null", "x" * 5000, "1_0", "0x1f"]


def odd_words(chance: random.Random) -> list[str]:
    words = chance.choice(COMMANDS).split()
    for _ in range(chance.randrange(5)):
        key = chance.choice([*KEYS, "nproc", "json", "out", "gpus"])
        value = chance.choice(ODD_VALUES)
        words += chance.choice([[f"--{key}", value], [f"{key}={value}"], [value], [f"--{key}"], ["tiny"]])
    return words


def fuzz_shell(folder: Path, chance: random.Random) -> str:
    """A command line in a shell, which can pass no lone surrogate."""
    words = [word for word in odd_words(chance) if word.isprintable() or "\x1b" in word]
    line = shlex.join([sys.executable, "-m", "moefold", *words])
    found = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            line, shell=True, env=found, capture_output=True, text=True, errors="replace", timeout=SHELL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{words!r:.300}: not done within {SHELL_SECONDS:g} s"
    said = done.stdout + done.stderr
    bad = [text for text in ("Traceback", "No module named", "\x1b[2J") if text in said]
    is_fine = done.returncode in (0, 1, 2) and not bad
    return "" if is_fine else f"{words!r:.300}: {done.returncode} {said[-300:]}"


def fuzz_words(folder: Path, chance: random.Random) -> str:
    words = odd_words(chance)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            run_command_line(words)
        except SystemExit:
            pass
        except BaseException:
            return f"{words!r:.300}: {traceback.format_exc(limit=-2)}"
    return ""


def fuzz_config(folder: Path, chance: random.Random) -> str:
    lines: list[str] = []
    for _ in range(chance.randrange(1, 6)):
        section, _, key = chance.choice(KEYS).rpartition(".")
        lines.append(f"{section or 'train'}: {{{key}: {chance.choice(ODD_VALUES)}}}")
    text = list("\n".join(lines))
    for _ in range(chance.randrange(4)):
        text.insert(chance.randrange(len(text) + 1), chance.choice(list("{}[]:&*!|>-#\t\n'\"%@\x00\x85")))
    file = folder / "odd.yaml"
    file.write_text("".join(text), encoding="utf-8", errors="surrogatepass")
    try:
        resolve_recipe(str(file))
    except UserError as refused:
        return "" if all(line.isprintable() for line in str(refused).splitlines()) else f"not printable: {refused!r}"
    except BaseException:
        return f"{file.read_bytes()!r:.300}: {traceback.format_exc(limit=-2)}"
    return ""


def fuzz_checkpoint(folder: Path, chance: random.Random) -> str:
    sound = folder / "sound"
    if not sound.exists():
        save_small_checkpoint(sound)
    path = folder / "changed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(next(sound.glob("step-*")), path)
    name = chance.choice(["state.json", "ledger.json", MANIFEST_FILE])
    content = json.loads((path / name).read_bytes())
    change_somewhere(content, chance)
    if name == MANIFEST_FILE:
        content.pop("sha256", None)
        (path / name).write_bytes(seal_manifest(content))
    else:
        raw = json.dumps(content).encode()
        (path / name).write_bytes(raw)
        manifest = unseal_manifest((path / MANIFEST_FILE).read_bytes())
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (path / MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    try:
        require_run_position(verify_checkpoint(path).state)
    except DamagedCheckpoint:
        return ""
    except BaseException:
        return f"{name}: {content!r:.300}: {traceback.format_exc(limit=-2)}"
    return ""


def save_small_checkpoint(folder: Path) -> None:
    import torch

    from moefold.checkpoint.format.retention import RetentionPolicy
    from moefold.checkpoint.live.save import save_checkpoint
    from moefold.layout.axes import single_rank_world

    tensors = {"model.w": torch.ones(3, 4), "model.x": torch.ones(2)}
    state = {"step": 2, "consumed": 16, "config": {"train.steps": 4}}
    save_checkpoint(folder, 2, tensors, state, RetentionPolicy(9), single_rank_world())


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "words": fuzz_words,
    "shell": fuzz_shell,
    "configs": fuzz_config,
    "checkpoints": fuzz_checkpoint,
    "data": fuzz_data,
    "models": fuzz_model,
}


def run_cases(kind: str, cases: int, seed: int) -> list[str]:
    """The cases that failed, each with its number and what it raised."""
    chance = random.Random(seed)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number in range(cases):
            problem = KINDS[kind](Path(folder), chance)
            if problem:
                failed.append(f"case {number}: {problem}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    begun = time.monotonic()
    failed = run_cases(options.kind, options.cases, options.seed)
    for problem in failed:
        print(problem)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    seconds = time.monotonic() - begun
    print(f"{options.kind}: {len(failed)} of {options.cases} failed; {seconds:.0f} s, {memory} MiB at most", end="; ")
    print(f"seed {options.seed}")
    return min(100, len(failed))


if __name__ == "__main__":
    sys.exit(main())
