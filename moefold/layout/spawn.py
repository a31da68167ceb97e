"""`--nproc N`: start N copies of this command as ranks of one machine and watch them. Torch-free.

Rank 0 keeps the terminal. The others write to files, and the last lines of a rank that fails are shown. When one rank
ends badly the others are stopped: they would wait for it until the timeout.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from moefold.config.errors import UserError

MEETING_PORTS = range(20_000, 32_000)  # Linux gives 32768 and above to connections
GRACE_SECONDS = 10.0  # seconds a rank has to follow a failing one by itself, and then to obey SIGTERM


def find_free_port() -> int:
    """One that is free now and likely to stay so until ranks meet there, seconds later: not of the range from which
    connections get theirs, of which ranks make hundreds, and not the one that another run takes in this moment."""
    for port in random.SystemRandom().sample(MEETING_PORTS, 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise UserError(f"none of 100 ports from {MEETING_PORTS[0]} on is free; expected one; set --port")


def check_port_is_free(port: int) -> int:
    """The port, if it can be bound now."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be used ({error}); expected a free one; leave --port out, or try {find_free_port()}"
            ) from None
    return port


def run_local_ranks(arguments: Sequence[str], nproc: int, port: int | None = None) -> int:
    """Run `moefold ARGUMENTS` as nproc ranks; the exit code is that of the first rank that failed, or 0."""
    port = check_port_is_free(port) if port else find_free_port()
    threads = max(1, (os.cpu_count() or 1) // nproc)
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(nproc)]
        ranks = [start_rank_process(arguments, rank, nproc, port, threads, logs[rank]) for rank in range(nproc)]
        restore = forward_signals(ranks)
        try:
            return watch_rank_processes(ranks, logs)
        finally:
            restore()


def start_rank_process(
    arguments: Sequence[str], rank: int, nproc: int, port: int, threads: int, log: Path
) -> subprocess.Popen[bytes]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, **{k: str(v) for k, v in place.items()}}
    command = [sys.executable, "-m", "moefold", *arguments]
    # A process group of its own: Ctrl-C in a terminal then reaches the parent alone, which hands it on once.
    if rank == 0:
        return subprocess.Popen(command, env=env, process_group=0)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, process_group=0, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def forward_signals(ranks: Sequence[subprocess.Popen[bytes]]):
    """Hand SIGTERM and SIGINT on to every rank; they save and end by themselves. Returns what undoes this."""

    def send_to_every_rank(number: int, _frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, send_to_every_rank) for number in (signal.SIGTERM, signal.SIGINT)}
    return lambda: [signal.signal(number, handler) for number, handler in before.items()]


def watch_rank_processes(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> int:
    while any(rank.poll() is None for rank in ranks):
        failed = [i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed:
            return stop_after_failure(first_failed_rank(failed, ranks), ranks, logs)
        time.sleep(0.05)
    failed = [i for i, rank in enumerate(ranks) if rank.returncode != 0]
    return stop_after_failure(first_failed_rank(failed, ranks), ranks, logs) if failed else 0


def first_failed_rank(failed: Sequence[int], ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Who failed first, of those seen at the same moment: one that was killed could not have followed another."""
    return min(failed, key=lambda i: ranks[i].returncode >= 0)


def stop_after_failure(first: int, ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> int:
    """One rank failed: let the rest follow, stop those that do not, say who was first and why."""
    code = ranks[first].returncode
    deadline = time.monotonic() + (GRACE_SECONDS if code == 2 else 1.0)
    for stop in (None, signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if stop and rank.poll() is None:
                rank.send_signal(stop)
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
        deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.wait()
    refusing = next((i for i, rank in enumerate(ranks) if rank.returncode == 2), None)
    if refusing is not None:  # a refusal explains the other failures; rank 0 has printed its own
        first, code = refusing, 2
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with code {code}"
    if first != 0:
        said = logs[first].read_text(errors="replace").strip().splitlines()[-8:] if logs[first].exists() else []
        print(f"rank {first} {how}" + (":\n  " + "\n  ".join(said) if said else ""), file=sys.stderr)
    elif code < 0:
        print(f"rank 0 {how}", file=sys.stderr)
    print("the other ranks were stopped; what was committed is safe: continue with --resume auto", file=sys.stderr)
    return code if code > 0 else 1
