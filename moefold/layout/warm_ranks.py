"""Warm ranks: a starter, a process that has imported torch and moefold once, forks the ranks of `--nproc`, so that
neither a start nor a restart waits for imports in every rank. Torch-free; cli/rank_starter.py is the starter.

    launcher  -- requests: a line of JSON for each rank -->  starter  -- forks -->  rank, rank, ...
              <-- news: a record when a rank has begun, and when it has ended --

The starter ends with its launcher, and ranks with the starter. If it dies its ranks are killed, and the next rank is
forked from a new one.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moefold.config.errors import RunFailure

MODULE = "moefold.cli.rank_starter"
STARTER_NAME = "moefold-starter"  # as the system shows it, 15 characters at most
# A record is written and read whole, as pipes promise for so few bytes: a signal handler may read between two of them.
NEWS = struct.Struct("3i")  # which rank, its process, its exit code
STILL_RUNNING = 1 << 20
POLL_SECONDS = 0.01
PATIENCE = 60.0  # seconds until a starter has imported all

Environment = Mapping[str, str]


def can_start_warm() -> bool:
    """Whether this system tells when a process has ended that is not one's own (Linux)."""
    return hasattr(os, "pidfd_open")


class WarmRank:
    """A rank that a starter has forked, with what a launcher uses of `subprocess.Popen`."""

    def __init__(self, starter: WarmStarter):
        self.starter = starter
        self.pid = 0  # not yet known
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.starter.read_news()
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.poll() is None and not self.pid:
            if time.monotonic() > deadline:
                raise RunFailure(f"the starter of ranks did not answer within {PATIENCE:g} s")
            time.sleep(POLL_SECONDS)
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class WarmStarter:
    """The launcher's side of a starter, which is started when the first rank is asked for."""

    def __init__(self):
        self.process: subprocess.Popen[bytes] | None = None
        self.requests = -1  # handles of the two pipes
        self.news = -1
        self.ranks: list[WarmRank] = []

    def start_rank(self, arguments: Sequence[str], env: Environment, log: Path | None) -> WarmRank:
        """Have a rank forked, with this environment. Its output goes to the log, or without one where that of this
        process goes."""
        if self.process is None:
            self.open(env)
        rank = WarmRank(self)
        self.ranks.append(rank)
        request = {"rank": len(self.ranks) - 1, "arguments": list(arguments), "env": dict(env), "log": str(log or "")}
        line = json.dumps(request) + "\n"
        with suppress(BrokenPipeError):  # the news tell that the starter is lost
            write_all(self.requests, line.encode())
        return rank

    def open(self, env: Environment) -> None:
        wanted, self.requests = os.pipe()
        self.news, told = os.pipe()
        os.set_blocking(self.news, False)
        command = [sys.executable, "-m", MODULE, str(wanted), str(told)]
        threads = {"OMP_NUM_THREADS": env["OMP_NUM_THREADS"]}  # is read by imports
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **threads},
            process_group=0,
            stdin=subprocess.DEVNULL,
            pass_fds=(wanted, told),
        )
        os.close(wanted)
        os.close(told)

    def read_news(self) -> None:
        while self.process is not None:
            try:
                record = os.read(self.news, NEWS.size)
            except BlockingIOError:
                return
            if not record:
                self.lose_ranks()
                self.close()
                return
            number, pid, code = NEWS.unpack(record)
            rank = self.ranks[number]
            rank.pid = pid
            if code != STILL_RUNNING:
                rank.returncode = code

    def lose_ranks(self) -> None:
        """The starter is gone: nobody would learn how its ranks end."""
        for rank in self.ranks:
            if rank.returncode is None:
                if rank.pid:
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGKILL)
                rank.returncode = -signal.SIGKILL

    def close(self) -> None:
        """End the starter, if there is one."""
        if self.process is None:
            return
        process = self.process
        self.process = None
        self.ranks = []
        os.close(self.requests)
        os.close(self.news)
        process.wait()


def write_all(file: int, raw: bytes) -> None:
    while raw:
        count = os.write(file, raw)
        raw = raw[count:]
