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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from moefold.config.errors import UserError
from moefold.layout.environment import LAUNCHER_VARIABLE, RANKS_FOLDER_VARIABLE
from moefold.layout.warm_ranks import WarmStarter, can_start_warm

MEETING_PORTS = range(20_000, 32_000)  # Linux gives 32768 and above to connections
GRACE_SECONDS = 10.0  # that ranks have to end by themselves after one has failed, and then to obey SIGTERM
POLL_SECONDS = 0.05
REPORTED_SECONDS = 0.3  # that ranks have to end once a hang is reported; one that is stopped never does
LOG_LINES_SHOWN = 8
HANG_CODE = 5  # of a rank that ends a run which hangs
HANG_FILE = "hang.txt"  # in the folder of the logs: who is named, to be printed by the launcher
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RankProcess(Protocol):
    """What a launcher uses of a rank's process."""

    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


Environment = Mapping[str, str]
StartRank = Callable[[Sequence[str], Environment, Path | None], RankProcess]  # arguments, environment, log
SignalHandler = Callable[[int, FrameType | None], None]
StoreServer = Callable[[socket.socket], object]  # serves a store on a listening socket


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


def signal_exit_code(number: int) -> int:
    """The exit code of a run that a signal has ended, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


class RanksEnd(NamedTuple):
    """How the ranks of a run have ended: its exit code, and in words what the first rank that failed died of."""

    code: int
    cause: str = ""


def start_interpreter(arguments: Sequence[str], env: Environment, log: Path | None) -> RankProcess:
    """A rank in an interpreter of its own. Without a log it keeps the terminal."""
    command = [sys.executable, "-m", "moefold", *arguments]
    # A process group of its own: Ctrl-C in a terminal then reaches the parent alone, which forwards it once.
    if log is None:
        return subprocess.Popen(command, env=env, process_group=0)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, process_group=0, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def run_local_ranks(
    arguments: Sequence[str], nproc: int, port: int | None = None, serve_store: StoreServer | None = None
) -> int:
    """Run `moefold ARGUMENTS` as nproc ranks; the exit code."""
    with way_to_start() as start_rank:
        ended = launch_local_ranks(arguments, nproc, port, serve_store, start_rank)
    return ended.code


@contextmanager
def way_to_start() -> Iterator[StartRank]:
    """What starts ranks on this system: a starter, which has imported all once and forks them, or for each an
    interpreter of its own."""
    if not can_start_warm():
        yield start_interpreter
        return
    with closing(WarmStarter()) as starter:
        yield starter.start_rank


def launch_local_ranks(
    arguments: Sequence[str],
    nproc: int,
    port: int | None,
    serve_store: StoreServer | None,
    start_rank: StartRank,
) -> RanksEnd:
    """Run `moefold ARGUMENTS` as nproc ranks. The exit code is 0, that of the first rank that failed, or after a signal
    that of the signal. `serve_store` serves the store of the ranks from this process; otherwise rank 0 does."""
    port = check_port_is_free(port) if port else find_free_port()
    cores = os.cpu_count() or 1
    threads = max(1, cores // nproc)
    with tempfile.TemporaryDirectory(prefix="moefold-ranks-") as folder:
        names = [f"rank-{rank}.log" for rank in range(nproc)]
        logs = [Path(folder, name) for name in names]
        listener = listen_on(port) if serve_store else None
        ranks: list[RankProcess] = []
        for rank, log in enumerate(logs):
            env = rank_environment(rank, nproc, port, threads, log.parent, served=bool(serve_store))
            ranks.append(start_rank(arguments, env, log if rank else None))
        with forwarded_signals(ranks) as forwarded, served_store(serve_store, listener):
            return watch_rank_processes(ranks, logs, forwarded)


def listen_on(port: int) -> socket.socket:
    """A socket that ranks can connect to at once; they are answered when the store is served."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    return listener


@contextmanager
def served_store(serve_store: StoreServer | None, listener: socket.socket | None) -> Iterator[None]:
    """A store on the socket inside the block. It is opened in a thread: that imports torch, and ranks are watched
    meanwhile."""
    if serve_store is None or listener is None:
        yield
        return
    stores: list[object] = []

    def open_store() -> None:
        stores.append(serve_store(listener))

    opening = threading.Thread(target=open_store)
    opening.start()
    try:
        yield
    finally:
        opening.join()
        stores.clear()


def rank_environment(rank: int, nproc: int, port: int, threads: int, logs: Path, served: bool) -> Environment:
    rendezvous = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER_VARIABLE: str(os.getpid()),
        RANKS_FOLDER_VARIABLE: str(logs),
        "TORCHELASTIC_USE_AGENT_STORE": str(served),
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **rendezvous}


@contextmanager
def forwarded_signals(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Forward ending signals to every rank, which then saves and ends by itself. Yields the list of those forwarded. A
    signal that is ignored stays so, for the ranks too: SIGHUP under nohup."""
    forwarded: list[int] = []

    def send_to_every_rank(number: int, _frame: object) -> None:
        forwarded.append(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    with handled_signals(send_to_every_rank):
        yield forwarded


@contextmanager
def handled_signals(handler: SignalHandler) -> Iterator[None]:
    """Ending signals reach the handler inside the block, but for those that are ignored."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    heard = [number for number in before if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def watch_rank_processes(ranks: Sequence[RankProcess], logs: Sequence[Path], forwarded: Sequence[int]) -> RanksEnd:
    """Wait for all ranks, or for the first that fails. `forwarded`: signals that ranks were sent."""
    while any_running(ranks):
        if failed_ranks(ranks):
            break
        time.sleep(POLL_SECONDS)
    failed = failed_ranks(ranks)
    if not failed:
        return RanksEnd(0)
    first = first_failed_rank(failed, ranks)
    code = stop_code(ranks[first].returncode, forwarded)
    if code is not None:
        end_all_ranks(ranks, GRACE_SECONDS)
        return RanksEnd(code)
    told = logs[0].with_name(HANG_FILE)
    if ranks[first].returncode == HANG_CODE or told.exists():  # a rank may have lost contact with one that ended so
        return stop_after_hang(ranks, told)
    return stop_after_failure(first, ranks, logs)


def stop_after_hang(ranks: Sequence[RankProcess], told: Path) -> RanksEnd:
    """A rank ended the run because it hangs: print which ranks are named, and kill those that are left."""
    text = ""
    patience = 1.0
    if told.exists():
        text = told.read_text(encoding="utf-8")
        sys.stderr.write(text)
        sys.stderr.flush()
        patience = REPORTED_SECONDS
    end_all_ranks(ranks, patience, signals=(signal.SIGKILL,))
    lines = text.splitlines() or ["the run hangs"]
    cause = "; ".join(lines[:2])  # which limit was passed, and which rank is named
    return RanksEnd(HANG_CODE, cause.removeprefix("moefold: "))


def stop_code(code: int, forwarded: Sequence[int]) -> int | None:
    """The exit code of a run that was asked to stop, by the code of its first rank; None where that rank failed. Before
    its first step, a rank is killed by the signal that was forwarded."""
    if -code in forwarded:
        return signal_exit_code(-code)
    asked = (*ENDING_SIGNALS, signal.SIGPIPE)
    known = map(signal_exit_code, asked)
    return code if code in known else None


def any_running(ranks: Sequence[RankProcess]) -> bool:
    return any(rank.poll() is None for rank in ranks)


def failed_ranks(ranks: Sequence[RankProcess]) -> list[int]:
    codes = [rank.poll() for rank in ranks]
    return [number for number, code in enumerate(codes) if code not in (None, 0)]


def first_failed_rank(failed: Sequence[int], ranks: Sequence[RankProcess]) -> int:
    """The rank that failed first, of those seen at the same moment: one that was killed did not follow another."""
    return min(failed, key=lambda number: ranks[number].returncode >= 0)


def stop_after_failure(first: int, ranks: Sequence[RankProcess], logs: Sequence[Path]) -> RanksEnd:
    """One rank failed: wait for the rest, stop those that go on, and print which rank was first and why."""
    code = ranks[first].returncode
    if code == -signal.SIGKILL:  # follows no other failure: the others have nothing to explain
        end_all_ranks(ranks, patience=0.0, signals=(signal.SIGKILL,))
    else:
        end_all_ranks(ranks, patience=GRACE_SECONDS if code == 2 else 1.0)
    codes = [rank.returncode for rank in ranks]
    if 2 in codes:  # a refusal explains the other failures; rank 0 has printed its own
        code = 2
        first = codes.index(code)
    report_failed_rank(first, code, logs[first])
    if code != 2:  # input that must change first
        print("the other ranks were stopped; what was committed is safe: continue with --resume auto", file=sys.stderr)
    cause = f"rank {first} {ending_in_words(code)}"
    return RanksEnd(code if code > 0 else 1, cause)


def ending_in_words(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def end_all_ranks(
    ranks: Sequence[RankProcess],
    patience: float,
    signals: Sequence[int] = (signal.SIGTERM, signal.SIGKILL),
) -> None:
    """Wait `patience` seconds for all ranks to end by themselves, then send them one signal after the other."""
    deadline = time.monotonic() + patience
    for stop in (None, *signals):
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
    message = f"rank {number} {ending_in_words(code)}"
    if number == 0 and not killed:
        return
    if number > 0 and log.exists():
        text = log.read_text(errors="replace")
        lines = text.strip().splitlines()
        last_lines = lines[-LOG_LINES_SHOWN:]
        if last_lines:
            message += ":\n  " + "\n  ".join(last_lines)
    print(message, file=sys.stderr)
