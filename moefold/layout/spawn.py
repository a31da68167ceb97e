"""Local ranks (`--nproc N`): start N copies of this command on one machine and watch them. Torch-free.

Rank 0 keeps the terminal. The others write to files, and the last lines of a rank that fails are printed. When one rank
fails the others are stopped: they would wait for it until the timeout.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from moefold.config.errors import UserError

MEETING_PORTS = range(20_000, 32_000)  # Linux gives 32768 and above to connections
GRACE_SECONDS = 10.0  # that ranks have to end by themselves after one has failed, and then to obey SIGTERM
POLL_SECONDS = 0.05
LOG_LINES_SHOWN = 8

RankProcess = subprocess.Popen[bytes]


def find_free_port() -> int:
    """A port that is free now and likely to stay so until ranks meet there, seconds later: outside the range from which
    connections get theirs, of which ranks make hundreds, and drawn at random, so that two runs do not take the same."""
    for port in random.SystemRandom().sample(MEETING_PORTS, 100):
        try:
            bind_port(port)
        except OSError:
            continue
        return port
    raise UserError(f"none of 100 ports from {MEETING_PORTS[0]} on is free; expected one; set --port")


def check_port_is_free(port: int) -> int:
    """The port, if it can be bound now."""
    try:
        bind_port(port, reuse=True)
    except (OSError, OverflowError) as error:
        another = find_free_port()
        raise UserError(
            f"port {port} cannot be used ({error}); expected a free one; leave --port out, or try {another}"
        ) from None
    return port


def bind_port(port: int, reuse: bool = False) -> None:
    """Bind and release a port; OSError where it is taken. `reuse`: one in TIME_WAIT counts as free."""
    with socket.socket() as probe:
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def run_local_ranks(arguments: Sequence[str], nproc: int, port: int | None = None) -> int:
    """Run `moefold ARGUMENTS` as nproc ranks; the exit code is that of the first rank that failed, or 0."""
    port = check_port_is_free(port) if port else find_free_port()
    cores = os.cpu_count() or 1
    threads = max(1, cores // nproc)
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as folder:
        names = [f"rank-{rank}.log" for rank in range(nproc)]
        logs = [Path(folder, name) for name in names]
        ranks: list[RankProcess] = []
        for rank, log in enumerate(logs):
            process = start_rank_process(arguments, rank, nproc, port, threads, log)
            ranks.append(process)
        restore = forward_signals(ranks)
        try:
            return watch_rank_processes(ranks, logs)
        finally:
            restore()


def start_rank_process(
    arguments: Sequence[str], rank: int, nproc: int, port: int, threads: int, log: Path
) -> RankProcess:
    rendezvous = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, **rendezvous}
    command = [sys.executable, "-m", "moefold", *arguments]
    # A process group of its own: Ctrl-C in a terminal then reaches the parent alone, which forwards it once.
    if rank == 0:
        return subprocess.Popen(command, env=env, process_group=0)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, process_group=0, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def forward_signals(ranks: Sequence[RankProcess]) -> Callable[[], None]:
    """Forward SIGTERM and SIGINT to every rank, which then saves and ends by itself. Returns a function that restores
    the handlers from before."""

    def send_to_every_rank(number: int, _frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    forwarded = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, send_to_every_rank) for number in forwarded}

    def restore_handlers() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore_handlers


def watch_rank_processes(ranks: Sequence[RankProcess], logs: Sequence[Path]) -> int:
    """Wait for all ranks, or for the first that fails; the exit code."""
    while any_running(ranks):
        if failed_ranks(ranks):
            break
        time.sleep(POLL_SECONDS)
    failed = failed_ranks(ranks)
    if not failed:
        return 0
    first = first_failed_rank(failed, ranks)
    return stop_after_failure(first, ranks, logs)


def any_running(ranks: Sequence[RankProcess]) -> bool:
    return any(rank.poll() is None for rank in ranks)


def failed_ranks(ranks: Sequence[RankProcess]) -> list[int]:
    codes = [rank.poll() for rank in ranks]
    return [number for number, code in enumerate(codes) if code not in (None, 0)]


def first_failed_rank(failed: Sequence[int], ranks: Sequence[RankProcess]) -> int:
    """The rank that failed first, of those seen at the same moment: one that was killed did not follow another."""
    return min(failed, key=lambda number: ranks[number].returncode >= 0)


def stop_after_failure(first: int, ranks: Sequence[RankProcess], logs: Sequence[Path]) -> int:
    """One rank failed: wait for the rest, stop those that go on, and print which rank was first and why."""
    code = ranks[first].returncode
    patience = GRACE_SECONDS if code == 2 else 1.0
    end_all_ranks(ranks, patience)
    codes = [rank.returncode for rank in ranks]
    if 2 in codes:  # a refusal explains the other failures; rank 0 has printed its own
        code = 2
        first = codes.index(code)
    report_failed_rank(first, code, logs[first])
    print("the other ranks were stopped; what was committed is safe: continue with --resume auto", file=sys.stderr)
    return code if code > 0 else 1


def end_all_ranks(ranks: Sequence[RankProcess], patience: float) -> None:
    """Wait `patience` seconds for all ranks to end by themselves, then send SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + patience
    for stop in (None, signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if stop and rank.poll() is None:
                rank.send_signal(stop)
        while time.monotonic() < deadline and any_running(ranks):
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        rank.wait()


def report_failed_rank(number: int, code: int, log: Path) -> None:
    """How a rank ended, with the last lines of its log. Rank 0 has printed its own error, unless it was killed."""
    killed = code < 0
    ending = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with code {code}"
    message = f"rank {number} {ending}"
    if number == 0 and not killed:
        return
    if number > 0 and log.exists():
        text = log.read_text(errors="replace")
        lines = text.strip().splitlines()
        last_lines = lines[-LOG_LINES_SHOWN:]
        if last_lines:
            message += ":\n  " + "\n  ".join(last_lines)
    print(message, file=sys.stderr)
