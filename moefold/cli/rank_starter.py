"""The starter of warm ranks: imports all that a rank needs, then forks a rank whenever its launcher asks for one.

    python -m moefold.cli.rank_starter REQUESTS NEWS      the handles of two pipes (layout/warm_ranks.py)

It runs nothing of a run itself and starts no thread, so that a fork of it is a fresh process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from moefold.cli.main import main as run_main
from moefold.layout.environment import PARENT_VARIABLE
from moefold.layout.warm_ranks import NEWS, STARTER_NAME, STILL_RUNNING

MODULES = (
    "moefold.cli.train",
    "moefold.train.loop",
    "moefold.layout.numa",
    "moefold.watch.hang_watch",
    "torch.nn.attention.bias",  # with torch's compiler
)
READ_BYTES = 1 << 16
FAILED = 1

Request = dict[str, Any]


def import_all() -> None:
    for name in MODULES:
        import_module(name)
    agreement = import_module("moefold.layout.agreement")
    agreement.source_digest()  # is remembered: every rank compares it
    gc.collect()
    gc.freeze()  # a rank would copy every page that garbage collection goes through


class RankStarter:
    def __init__(self, requests: int, news: int):
        self.requests = requests
        self.news = news
        self.unread = b""
        self.ranks: dict[int, tuple[int, int]] = {}  # number and process, by a handle of the process

    def serve_until_closed(self) -> None:
        """Serve until the launcher closes its end, or ends."""
        while True:
            watched = [self.requests, *self.ranks]
            ready, _, _ = select.select(watched, [], [])
            for handle in ready:
                if handle in self.ranks:
                    self.tell_end(handle)
                elif not self.read_requests():
                    return

    def read_requests(self) -> bool:
        """Start the ranks that are asked for; False where nobody will ask again."""
        raw = os.read(self.requests, READ_BYTES)
        *lines, self.unread = (self.unread + raw).split(b"\n")
        for line in lines:
            self.start_rank(json.loads(line))
        return bool(raw)

    def start_rank(self, request: Request) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_rank(request, parent)
        handle = os.pidfd_open(pid)
        self.ranks[handle] = request["rank"], pid
        self.tell(request["rank"], pid, STILL_RUNNING)

    def tell_end(self, handle: int) -> None:
        number, pid = self.ranks.pop(handle)
        _, status = os.waitpid(pid, 0)
        os.close(handle)
        self.tell(number, pid, os.waitstatus_to_exitcode(status))

    def tell(self, number: int, pid: int, code: int) -> None:
        with suppress(BrokenPipeError):  # the launcher is gone, which the next request tells
            os.write(self.news, NEWS.pack(number, pid, code))

    def become_rank(self, request: Request, parent: int) -> None:
        """Run the command in this process, and end it."""
        try:
            os.setpgid(0, 0)
            for handle in (self.requests, self.news, *self.ranks):
                os.close(handle)
            os.environ.clear()
            os.environ.update(request["env"])
            os.environ[PARENT_VARIABLE] = str(parent)
            show_name(f"moefold-rank-{os.environ['RANK']}")
            if request["log"]:
                write_to(request["log"])
            sys.argv = ["moefold", *request["arguments"]]
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            run_main()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(FAILED)


def write_to(log: str) -> None:
    """Send all output of this process to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)


def show_name(name: str) -> None:
    """Let the system show this process under a name."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def serve_ranks(requests: int, news: int) -> None:
    show_name(STARTER_NAME)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that is interrupted while it is forked ends in silence
    import_all()
    RankStarter(requests, news).serve_until_closed()


if __name__ == "__main__":
    serve_ranks(*map(int, sys.argv[1:]))
    os._exit(0)
