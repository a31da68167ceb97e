"""Trials of two nodes under torchrun: network namespaces, joined by a link, with two ranks and a keeper each.

    python -m tests.support.node_trials cut      the link is taken down until the run has noticed
    python -m tests.support.node_trials lost     the second node is lost with all its processes, and comes back
    python -m tests.support.node_trials left     it does not come back: `--nnodes 1:2` goes on with what is left
    python -m tests.support.node_trials          all of them

Needs root. Nothing is saved to the disk while the run trains, so that it can go on from keepers alone. The exit code
is the number of runs that did not name their fault, go on from memory, and end with the losses of a run that nobody
disturbed (`left`, which goes on with fewer ranks: nearly so).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from moefold.cli.chaos_job import SMALL_KEYS, Keys, RunFiles, start_command, train_words, write_corpus
from moefold.cli.chaos_links import VirtualLink, link_hindrance

STEPS = 120
FAULT_STEP = 30
RANKS_OF_NODE = 2
MEETING_PORT = 29_400
PATIENCE = 240.0
# Torch's agents tell the address of a store that they keep in the first round alone: a newcomer would wait for it.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MOST_DIFFERENCE = 0.05  # of the last loss, where the run goes on with fewer ranks: sums are added in another order
KEYS: Keys = {
    **SMALL_KEYS,
    "train.steps": STEPS,
    "train.validate_every": STEPS,
    "train.step_timeout": 6,
    "checkpoint.every": 100 * STEPS,
    "checkpoint.memory_every": 5,
    "observe.compare_every": 0,
    "observe.times_every": 10,
}


class NodesJob(RunFiles):
    """A run on two nodes, each with an agent of torchrun."""

    def __init__(self, folder: Path, keys: Keys, nodes: str, env: Keys):
        super().__init__(folder)
        folder.mkdir(parents=True)
        self.keys = keys
        self.nodes = nodes
        self.env = env
        self.link = VirtualLink()
        self.agents: list[subprocess.Popen[bytes] | None] = [None, None]
        try:
            self.link.open()
            for node in (0, 1):
                self.start_node(node)
        except BaseException:
            self.close()
            raise

    def start_node(self, node: int) -> None:
        first, own = self.link.hosts[0], self.link.hosts[node]
        launch = ["--nnodes", self.nodes, "--nproc-per-node", str(RANKS_OF_NODE), "--max-restarts", "5"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{MEETING_PORT}", "--rdzv-id", "trial"]
        hosts = ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", own]
        torchrun = ["-m", "torch.distributed.run", *launch, *meet, *hosts, "--no-python"]
        words = [*train_words(self.out, self.keys), "--resume", "auto"]
        env = {"GLOO_SOCKET_IFNAME": self.link.ends[node], **self.env}
        enter = ["ip", "netns", "exec", self.link.spaces[node]]
        self.agents[node] = start_command(words, self.log_of(node), env, [*enter, sys.executable, *torchrun])

    def log_of(self, node: int) -> Path:
        return self.log.with_name(f"log-{node}")

    def said(self) -> str:
        logs = [self.log_of(node) for node in (0, 1)]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def processes(self, node: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.link.spaces[node]], capture_output=True, text=True)
        return list(map(int, found.stdout.split()))

    def kill_node(self, node: int) -> None:
        """Power off: its peers hear nothing of it."""
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until(self, condition: Callable[[], object], what: str) -> float:
        """Seconds until the run has done it."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < PATIENCE, f"no {what}: {self.said()[-6000:]}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def finish(self) -> list[int]:
        agents = [agent for agent in self.agents if agent is not None]
        return [agent.wait(PATIENCE) for agent in agents]

    def close(self) -> None:
        for node in (0, 1):
            self.kill_node(node)
        for agent in self.agents:
            if agent is not None:
                agent.wait()
        self.link.close()


def cut_and_join(job: NodesJob) -> None:
    job.link.cut()
    named = job.wait_until(lambda: " does not answer" in job.said(), "name of the ranks behind the link")
    print(f"named after {named:.1f} s")
    job.link.join()


def lose_and_replace(job: NodesJob) -> None:
    lose_node(job)
    job.start_node(1)


def lose_node(job: NodesJob) -> None:
    job.link.cut()  # nobody is told that connections end
    job.kill_node(1)
    named = job.wait_until(lambda: " does not answer" in job.said(), "name of the ranks of the lost node")
    print(f"named after {named:.1f} s")
    assert job.agents[1] is not None
    job.agents[1].wait()
    job.agents[1] = None
    job.link.join()


FAULTS: dict[str, tuple[Callable[[NodesJob], None], str, Keys]] = {
    "cut": (cut_and_join, "2", {}),
    "lost": (lose_and_replace, "2", NEW_STORE),
    "left": (lose_node, "1:2", NEW_STORE),
}


def undisturbed_losses(folder: Path, keys: Keys) -> list[tuple[object, ...]]:
    files = RunFiles(folder)
    folder.mkdir()
    words = [*train_words(files.out, {**keys, "checkpoint.memory_every": 0}), "--nproc", str(2 * RANKS_OF_NODE)]
    assert start_command(words, files.log, {}).wait() == 0, files.said()[-2000:]
    return files.losses()


def has_equal_losses(job: NodesJob, expected: list[tuple[object, ...]], name: str) -> bool:
    found = job.losses()
    if name != "left":
        return found == expected
    (*_, last), (*_, wanted) = found, expected
    return len(found) == len(expected) and abs(last[1] - wanted[1]) < MOST_DIFFERENCE  # pyright: ignore[reportOperatorIssue]


def try_fault(name: str, folder: Path, keys: Keys, expected: list[tuple[object, ...]]) -> bool:
    disturb, nodes, env = FAULTS[name]
    with closing(NodesJob(folder, keys, nodes, env)) as job:
        job.wait_until(lambda: job.step() >= FAULT_STEP, f"step {FAULT_STEP}")
        reached = job.step()
        begun = time.monotonic()
        disturb(job)
        job.wait_until(lambda: "resumed from" in job.said(), "resumption")
        resumed = time.monotonic() - begun
        codes = job.finish()
        found = re.findall(r"resumed from (\S+) at step (\d+)", job.said())
        equal = has_equal_losses(job, expected, name)
    (source, step), *_ = found
    print(f"{name} at step {reached}: resumed after {resumed:.1f} s from {source.split(':')[0]} at step {step}")
    print(f"agents ended with {codes}; losses {'equal' if equal else 'NOT equal'}")
    return equal and source.startswith("keepers:") and not any(codes)


def main(argv: list[str]) -> int:
    hindrance = link_hindrance()
    if hindrance:
        print(f"skipped: {hindrance}")
        return 0
    with tempfile.TemporaryDirectory(prefix="moefold-nodes-") as name:
        folder = Path(name)
        keys = {**KEYS, "data.files": str(write_corpus(folder))}
        expected = undisturbed_losses(folder / "undisturbed", keys)
        passed = [try_fault(fault, folder / fault, keys, expected) for fault in argv or FAULTS]
    return passed.count(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
