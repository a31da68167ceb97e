"""The commands of README.md and docs/, run: those of a page in their order, in a folder of its own.

A command runs as it is written, and smaller: keys of size are added behind it (`added_words`). Where nothing is added,
it must print what the page says. What needs a GPU, a package or the machine for itself is listed here, with the reason.
What needs a GPU is run as it is written on a machine that has one:

    python -m tests.support.document_commands [WORD ...]      # all of these words are in the command
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.doc_commands import (
    PAGES,
    ROOT,
    DocCommand,
    check_output,
    read_blocks,
    run_in_shell,
    split_command,
)
from tests.support.launched import Launcher, be_launcher, wait_until
from tests.support.ranks import CONTEXT

ON_A_GPU = {  # how commands begin, and why a CPU is not enough
    "moefold bench generate": "times OLMoE and Qwen3-30B-A3B whole",
    "moefold bench memory": "recompute and offload of whole models",
    "moefold bench graphs": "CUDA graphs",
    "moefold bench lora": "adapters beside Qwen3-30B-A3B within a limit of device memory",
    "moefold bench recipes --variant": "600 steps of each variant",
    "moefold train tiny --train.steps 20 --memory.graphs": "CUDA graphs",
}
WHOLE_ON_A_GPU = (  # small on a CPU, and as they are written on a GPU
    "moefold train qwen3-30b-a3b",
    "moefold train deepseek-v2-lite",
    "moefold train olmoe-1b-7b",
)
NOT_RUN = {  # and what shows them otherwise
    "moefold train tiny --observe.wandb": "needs wandb and an account; tests/observe/test_wandb_tracker.py",
    "moefold train tiny --observe.mlflow": "needs mlflow-skinny; tests/observe/test_mlflow_tracker.py",
    "moefold eval DIR --tasks hellaswag": "needs lm-eval and downloads; tests/train/test_harness.py",
    "moefold eval DIR --tasks gsm8k": "needs lm-eval and downloads; tests/train/test_harness.py",
    "moefold doctor chaos": "breaks runs for minutes; tests/cli/test_chaos.py",
    "moefold bench recipes --device cpu": "takes hours; tests/bench/test_recipes.py",
    "moefold bench overlap": "measures time, with the machine to itself; tests/bench/test_overlap.py",
    "moefold bench turns": "measures time, with the machine to itself; tests/bench/test_turns.py",
    "moefold bench calibrate": "measures the machine; tests/bench/test_calibrate.py",
    "OMP_NUM_THREADS=1 moefold bench save": "measures the disk; tests/bench/test_save.py",
}
EXIT_CODES = {"--observe.fault": 1, "ckpt diff runs/tiny runs/edited": 1}  # of what is to fail, and of what differs
SLOW = ("torchrun ", "--nproc 8", "--world 8", "train qwen3-30b-a3b")
LIMIT = 600.0  # seconds for a command, also on a busy machine
SERVERS = ("watch", "web")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
ELSEWHERE = {"/shared/": "shared/", "node0": "127.0.0.1", "--nproc-per-node 8": "--nproc-per-node 2"}

RUN_SIZES = {
    "--train.steps": 2,
    "--train.global_batch": 8,
    "--train.validate_sequences": 2,
    "--train.sample_tokens": 4,
    "--data.seq_len": 64,
}
MODEL_SIZES = {"--model.layers": 4, "--model.hidden": 32, "--model.moe.ffn": 32}
BENCH_SIZES = {"layer": ["--repeat=1"], "step": ["--model=olmoe-1b-7b"]}
SMALL_DATA = ["--data.source=files", "--data.files=notes.txt"]
GPU_PRECISION = ["--train.precision=bf16"]  # which a GPU takes by itself


# ---- which commands


def page_commands(page: Path) -> Iterator[DocCommand]:
    for block in read_blocks(page):
        yield from block.commands


def commands_run_here(page: Path) -> list[DocCommand]:
    listed = tuple(ON_A_GPU | NOT_RUN)
    return [command for command in page_commands(page) if not command.text.startswith(listed)]


def is_slow(command: DocCommand) -> bool:
    return any(sign in command.text for sign in SLOW)


def commands_of_a_gpu(words: Sequence[str]) -> list[str]:
    """Each once, of those with all of these words."""
    starts = (*ON_A_GPU, *WHOLE_ON_A_GPU)
    texts = [command.text for page in PAGES for command in page_commands(page)]
    wanted = [text for text in texts if text.startswith(starts) and all(word in text for word in words)]
    return list(dict.fromkeys(wanted))


# ---- on a CPU


def run_document_command(command: DocCommand, folder: Path) -> None:
    printed = ""
    expected = expected_code(command)
    calls = split_command(command.text)
    for call in calls:
        code, text = run_call(call, command.is_refused, folder)
        printed += text
        assert code == (expected if call is calls[-1] else 0), f"{call}\nends with {code}:\n{text}"
    if not is_made_smaller(command):
        check_output(command.output, printed)


def expected_code(command: DocCommand) -> int:
    if command.is_refused:
        return 2
    return next((code for word, code in EXIT_CODES.items() if word in command.text), 0)


def is_made_smaller(command: DocCommand) -> bool:
    return not command.is_refused and " train " in command.text


def run_call(call: str, is_refused: bool, folder: Path) -> tuple[int | None, str]:
    """The exit code and the output of one call of a command line."""
    for there, here in ELSEWHERE.items():
        call = call.replace(there, here)
    words = shlex.split(call, comments=True)
    if words[0] == "torchrun":
        return run_torchrun(words, folder)
    if words[0] != "moefold":
        return run_words(["bash", "-c", call], folder)
    added = [] if is_refused else added_words(words[1:])
    with started([*words[1:], *added], folder) as running:
        if words[1] in SERVERS:
            look_at_page(running)
        return running.wait(LIMIT), running.output()


def added_words(arguments: Sequence[str]) -> list[str]:
    """What makes the call of moefold with these arguments a small one."""
    command, *rest = arguments
    if command in SERVERS:
        return ["--port", "0"]
    if command == "bench":
        return BENCH_SIZES.get(rest[0], [])
    if command != "train":
        return []
    sizes = RUN_SIZES
    if "--from-hf" not in rest and not rest[0].endswith(".yaml"):
        sizes = RUN_SIZES | MODEL_SIZES
    added = [f"{key}={size}" for key, size in sizes.items() if shown_size(key, rest) > size]
    if "--data.source" not in rest and "--data.files" not in rest:
        added += SMALL_DATA
    if "--observe.fault" in rest:
        added.append("--train.steps=3")  # the step of the fault
    if "--optim.main" in rest:
        added += GPU_PRECISION
    return added


def shown_size(key: str, words: Sequence[str]) -> float:
    return float(words[words.index(key) + 1]) if key in words else float("inf")


def run_words(words: Sequence[str], folder: Path) -> tuple[int, str]:
    environment = os.environ | NO_GPU | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def run_torchrun(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """All agents on this machine, one for each node."""
    after = words.index("moefold") + 1
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    agent = [sys.executable, "-m", "torch.distributed.run", *words[1:], *added_words(words[after:])]
    environment = os.environ | NO_GPU | {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        agents = [subprocess.Popen(agent, cwd=folder, env=environment, stdout=log, stderr=log) for _ in range(nodes)]
        codes = [agent.wait() for agent in agents]
        log.seek(0)
        return max(map(abs, codes)), log.read()


@contextmanager
def started(arguments: Sequence[str], folder: Path) -> Iterator[Launcher]:
    """The command `moefold ARGUMENTS` in a process that has torch loaded."""
    log = folder / "output.log"
    process = CONTEXT.Process(target=be_command_in, args=(list(arguments), folder, log))
    process.start()
    try:
        yield Launcher(process, log)
    finally:
        process.kill()
        process.join()


def be_command_in(arguments: list[str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    os.environ.update(NO_GPU)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    be_launcher(arguments, str(log), None, [])


def look_at_page(running: Launcher) -> None:
    """Ask a server for its page, once, and end it."""
    pattern = re.compile(r"http://127\.0\.0\.1:\d+/")
    assert wait_until(lambda: running.log.exists() and bool(pattern.search(running.output())), 60), running.output()
    (address,) = set(pattern.findall(running.output()))
    with urllib.request.urlopen(address, timeout=60) as reply:
        assert b"<html" in reply.read()
    os.kill(running.pid, signal.SIGINT)


# ---- on a GPU


def main(words: Sequence[str]) -> int:
    """Run the commands that need a GPU, and print what became of each; 1 if one failed."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for text in commands_of_a_gpu(words):
            begin = time.monotonic()
            verdict = verdict_on(text, Path(folder))
            failed += verdict != "ran"
            print(f"{verdict}, {time.monotonic() - begin:.0f} s: {text}", flush=True)
    return 1 if failed else 0


def verdict_on(text: str, folder: Path) -> str:
    try:
        run_in_shell(DocCommand(text, []), folder)
    except AssertionError as failure:
        print(failure, file=sys.stderr)
        return "failed"
    return "ran"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
