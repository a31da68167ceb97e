"""Real launchers with real ranks, started warm: the launcher is forked from a server that has torch loaded, and forks
its ranks where the command would start new interpreters. All else is the command's own: `moefold train ... --nproc N`
as a process with child processes, which can be stopped and killed for real.

    with launched(["train", "tiny", ..., "--nproc", "4"], tmp_path / "log") as launcher:
        os.kill(launcher.ranks()[2], signal.SIGSTOP)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.cli.chaos_job import rank_processes
from tests.support.ranks import CONTEXT
from tests.support.runs import SMALL, corpus


class ForkedRank:
    """What a launcher uses of `subprocess.Popen`, for a child that was forked."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def fork_rank(
    command: list[str],
    env: dict[str, str],
    process_group: int,
    stdout: Any = None,
    pass_fds: Sequence[int] = (),
    **_: Any,
) -> ForkedRank:
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 70
    try:
        os.setpgid(0, process_group)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        if stdout is not None:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
        for number in set(range(3, 64)).difference(pass_fds):  # as a new interpreter has it
            with contextlib.suppress(OSError):
                os.close(number)
        code = run_module(*command[2:])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_module(module: str, *arguments: str) -> int:
    """What `python -m MODULE ARGUMENTS` does; the exit code."""
    from moefold.cli import rank_starter
    from moefold.cli.main import run_command_line

    if module == rank_starter.__name__:
        rank_starter.serve_ranks(*map(int, arguments))
        return 0
    return run_command_line(arguments)


def be_launcher(argv: list[str], log: str, output: Any, ignored: list[int]) -> None:
    import torch

    from moefold.cli.main import run_command_line
    from moefold.layout import spawn

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(errors if output is None else output.fileno(), 1)
    if output is not None:
        output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    spawn.subprocess.Popen = fork_rank  # pyright: ignore[reportAttributeAccessIssue]
    code = run_command_line(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Launcher:
    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ranks(self) -> list[int]:
        """The process numbers of the ranks that live, in order of rank."""
        return rank_processes(self.pid)

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 150) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode


@contextlib.contextmanager
def launched(argv: Sequence[str], log: Path, output: Any = None, ignored: Sequence[int] = ()) -> Iterator[Launcher]:
    """The launcher of a command. `output`: a connection to be its standard output, which is the log otherwise."""
    process = CONTEXT.Process(target=be_launcher, args=(list(argv), str(log), output, list(ignored)))
    process.start()
    launcher = Launcher(process, log)
    known: list[int] = []
    try:
        wait_until(lambda: bool(launcher.ranks()) or "--nproc" not in argv or not process.is_alive())
        known = launcher.ranks() if process.is_alive() else []
        yield launcher
    finally:
        process.kill()
        process.join()
        for pid in known:
            if is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process lives; a zombie, which its parent has not yet waited for, does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 150) -> bool:
    """Wait until a condition holds; whether it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def small_ranks(folder: Path, name: str, ranks: int, *more: str) -> list[str]:
    """The command of a run of some ranks, with steps of some milliseconds."""
    command = ["train", "tiny", *SMALL, *corpus(folder), "--out", str(folder / name), "--force"]
    several = ["--nproc", str(ranks)] if ranks > 1 else []
    return [*command, *several, *more]


def has_steps(out: Path, count: int) -> bool:
    records = out / "metrics.jsonl"
    return records.exists() and records.read_text().count("\n") > count
