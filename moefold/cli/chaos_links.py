"""Faults of a link between two nodes: network namespaces, joined by a pair of virtual interfaces.

    namespace a                               namespace b
    rank 0, which serves the store  --veth--  rank 1

The link is cut by taking it down, and slowed by a token bucket (`tc tbf`). No other interface of the machine is
touched. Each node has one rank, and nobody supervises both: after a fault they are started again here, as a cluster's
scheduler does, when the link is back.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.cli.chaos_job import LOOK_SECONDS, Keys, RunFiles, start_command, train_words
from moefold.config.errors import RunFailure

NODES = ("a", "b")
PORT = 29_500  # inside a namespace every port is free
SLOW_RATE = "2mbit"
STARTS = 4


def link_hindrance() -> str:
    """Why no link can be made here; empty where one can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        return f"there is no command {' and '.join(missing)}"
    trial = f"mfchaos{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", trial], check=False)
    return ""


def run_ip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RunFailure(f"{' '.join(words)}: {done.stderr.strip()}")


class VirtualLink:
    """Two network namespaces with a link between them."""

    def __init__(self):
        number = os.getpid()
        self.spaces = [f"mfchaos{number}{node}" for node in NODES]
        self.ends = [f"mf{number}{node}" for node in NODES]
        self.hosts = ["10.213.7.1", "10.213.7.2"]

    def open(self) -> None:
        for space in self.spaces:
            run_ip("ip", "netns", "add", space)
        first, second = self.ends
        peer = ("peer", "name", second, "netns", self.spaces[1])
        run_ip("ip", "link", "add", first, "netns", self.spaces[0], "type", "veth", *peer)
        for space, end, host in zip(self.spaces, self.ends, self.hosts, strict=True):
            run_ip("ip", "-n", space, "address", "add", f"{host}/24", "dev", end)
            run_ip("ip", "-n", space, "link", "set", "lo", "up")
            run_ip("ip", "-n", space, "link", "set", end, "up")

    def cut(self) -> None:
        run_ip("ip", "-n", self.spaces[1], "link", "set", self.ends[1], "down")

    def join(self) -> None:
        run_ip("ip", "-n", self.spaces[1], "link", "set", self.ends[1], "up")

    def slow(self) -> None:
        for space, end in zip(self.spaces, self.ends, strict=True):
            bucket = ("rate", SLOW_RATE, "burst", "32kbit", "latency", "400ms")
            run_ip("tc", "-n", space, "qdisc", "add", "dev", end, "root", "tbf", *bucket)

    def quicken(self) -> None:
        for space, end in zip(self.spaces, self.ends, strict=True):
            run_ip("tc", "-n", space, "qdisc", "delete", "dev", end, "root")

    def close(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


@dataclass(frozen=True)
class LinkFault:
    """`sign`: words of the run that name the fault."""

    disturb: Callable[[VirtualLink], None]
    restore: Callable[[VirtualLink], None]
    sign: str


LINK_FAULTS = {
    "cut": LinkFault(VirtualLink.cut, VirtualLink.join, "rank 1 does not answer"),
    "link": LinkFault(VirtualLink.slow, VirtualLink.quicken, "the link between rank 0 and rank 1"),
}


class LinkedJob(RunFiles):
    """A run of two ranks, each on a node of its own, started again after a fault."""

    def __init__(self, folder: Path, keys: Keys, patience: float):
        super().__init__(folder)
        folder.mkdir(parents=True)
        self.keys = keys
        self.deadline = time.monotonic() + patience
        self.link = VirtualLink()
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.starts = 0
        self.restarted: list[dict[str, Any]] = []
        try:
            self.link.open()
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self.starts += 1
        words = [*train_words(self.out, self.keys), "--resume", "auto"]
        for rank, (space, end) in enumerate(zip(self.link.spaces, self.link.ends, strict=True)):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.link.hosts[0],
                "MASTER_PORT": str(PORT),
                "TORCHELASTIC_RESTART_COUNT": str(self.starts),
                "GLOO_SOCKET_IFNAME": end,
            }
            log = self.log if rank == 0 else self.log.with_name("log-1")
            self.ranks.append(start_command(words, log, place, ("ip", "netns", "exec", space)))

    def restarts(self) -> list[dict[str, Any]]:
        return self.restarted

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def check_time(self, what: str) -> None:
        if time.monotonic() > self.deadline:
            raise RunFailure(f"the run took too long for {what}")
        time.sleep(LOOK_SECONDS)

    def wait_for_step(self, step: int) -> None:
        while self.step() < step:
            if self.codes() != [None, None]:
                raise RunFailure(f"a rank ended before step {step}")
            self.check_time(f"step {step}")

    def wait_for_sign(self, sign: str) -> str:
        """Wait for the words that name the fault, in the log of either node."""
        while True:
            for line in self.said_by_both().splitlines():
                if sign in line:
                    return line[line.index(sign) :]
            if self.codes() == [0, 0]:
                raise RunFailure(f'the run ended before it said "{sign}"')
            self.check_time(f'"{sign}"')

    def said_by_both(self) -> str:
        other = self.log.with_name("log-1")
        return self.said() + (other.read_text(errors="replace") if other.exists() else "")

    def finish(self) -> int:
        """Wait for the end, and start the run again while it ends by a fault."""
        while True:
            while None in self.codes():
                self.check_time("its end")
            codes = self.codes()
            if codes == [0, 0]:
                return 0
            if self.starts >= STARTS:
                return max(code or 0 for code in codes) or 1
            self.restarted.append({"step": self.step() + 1, "cause": f"ranks ended with codes {codes}"})
            self.ranks = []
            self.start()

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self.link.close()
