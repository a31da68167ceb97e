"""Ranks of several nodes under torchrun agree on their attempt, whatever their agents have counted, and never take that
of ranks that are gone."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch.distributed as dist

from moefold.layout.environment import Rendezvous
from moefold.layout.meeting import NAMES, attempt_of_all
from tests.support.ranks import CONTEXT


def place_of(rank: int, port: int, attempt: str) -> Rendezvous:
    return Rendezvous(rank, 2, 0, 1, "127.0.0.1", port, attempt, agent=True)


def connect(place: Rendezvous) -> dist.Store:
    return dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)


def be_rank_zero(place: Rendezvous, answer: Any) -> None:
    answer.send(attempt_of_all(place, connect))
    signal.pause()  # until killed


def started_rank_zero(port: int, attempt: str) -> tuple[Any, str]:
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=be_rank_zero, args=(place_of(0, port, attempt), writer), daemon=True)
    process.start()
    return process, reader.recv()


def test_ranks_whose_agents_have_counted_otherwise_meet_and_never_those_that_are_gone():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, name = started_rank_zero(store.port, "3")
    newcomer = place_of(1, store.port, "0")
    assert attempt_of_all(newcomer, connect) == name
    assert attempt_of_all(newcomer, connect) == name
    first.kill()
    first.join()
    NAMES.clear()  # a new process has none
    heard: list[str] = []
    asking = threading.Thread(target=lambda: heard.append(attempt_of_all(newcomer, connect)))
    asking.start()  # before its rank 0 is there
    second, renamed = started_rank_zero(store.port, "4")
    asking.join(60)
    assert heard == [renamed]
    assert renamed != name
    second.kill()
    second.join()


def test_on_one_node_the_agents_count_is_the_attempt():
    alone = Rendezvous(1, 2, 1, 2, attempt="7", agent=True)
    assert attempt_of_all(alone, connect) == "7"
