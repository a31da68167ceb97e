"""The arena of CPU ranks: exchanges in turns, a lost peer that is named, and no file that stays."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moefold.comm.arena import Arena, SharedArena
from moefold.config.errors import RunFailure
from moefold.layout.axes import World
from tests.support.ranks import run_ranks

EXCHANGES = 200
PATIENCE = 1.5  # also on a busy machine


def exchange_often(world: World) -> list[int]:
    arena = SharedArena(world.ep, 64, patience=60.0)
    return wrong_exchanges(arena, world, EXCHANGES, pause=1e-4)


def wrong_exchanges(arena: Arena, world: World, exchanges: int, pause: float) -> list[int]:
    """The numbers of exchanges in which a rank did not find what the others had written for it. Every rank writes the
    number of the exchange to all rooms, as fast as it can and each at a pace of its own."""
    wrong = []
    for number in range(exchanges):
        rooms = arena.rooms(world.size, 2, torch.int64)
        for room in rooms:
            room[world.rank] = number
        arena.exchange("numbers")
        if (number + world.rank) % 3 == 0:
            time.sleep(pause)
        if not bool((rooms[world.rank] == number).all()):
            wrong.append(number)
    return wrong


class LostPeer(NamedTuple):
    message: str
    seconds: float
    mapped: list[str]


def lose_a_peer(world: World) -> LostPeer:
    """Rank 1 leaves its part of an arena to a child, which takes part in one exchange and is killed."""
    arena = SharedArena(world.ep, 64, PATIENCE)
    if world.rank == 1:
        child = os.fork()
        if child == 0:
            arena.exchange("something")
            signal.pause()
        while arena.words[0, 1] == 0:
            time.sleep(1e-3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return LostPeer("", 0.0, [])
    arena.exchange("something")
    begun = time.monotonic()
    with pytest.raises(RunFailure) as lost:
        arena.exchange("tokens")
    seconds = time.monotonic() - begun
    maps = Path("/proc/self/maps").read_text().splitlines()
    return LostPeer(str(lost.value), seconds, [line for line in maps if "moefold-arena" in line])


def both(world: World) -> tuple[list[int], LostPeer]:
    return exchange_often(world), lose_a_peer(world)


@cache
def on_two():
    return run_ranks(both, 2, ep=2)


def test_no_room_is_written_while_it_is_read():
    assert [wrong for wrong, _ in on_two()] == [[], []]


def test_a_killed_peer_is_named_within_the_timeout():
    lost = on_two()[0][1]
    assert lost.message.startswith("rank 1 gave no signal of tokens over ep within 1.5 s")
    assert PATIENCE <= lost.seconds < PATIENCE + 5


def test_the_file_is_gone_as_soon_as_all_have_opened_it():
    mapped = on_two()[0][1].mapped
    assert mapped
    assert all(line.endswith("(deleted)") for line in mapped)
