"""Played ranks: one process runs the code of several ranks, with their memory side by side on one device.

A thread for each rank, of which one runs at a time. An exchange passes the turn on, so that in the device's only stream
all ranks write before the first of them reads:

    rank 0   write, signal |                | read, write, signal |
    rank 1                 | write, signal  |                     | read, ...

Kernels of an exchange signal as on ranks of their own, into spare memory, and find all signals given: they would wait
for kernels behind them in the stream.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from moefold.comm.arena import Arena, ArenaRooms, words_of
from moefold.dispatch.device_arena import DeviceArena, PeerMemory, part_sizes
from moefold.layout.axes import Axis
from moefold.layout.peer_rooms import PeerRooms

T = TypeVar("T")
PlayedEnd = tuple[int, Any, Exception | None]  # of a rank: its result, or its error
EVERY_SIGNAL = 2**62  # the number of an exchange that is never reached
PATIENCE = 1.0  # seconds


class TurnOrder:
    """Who of the played ranks runs, and the seconds in which each has run."""

    def __init__(self, ranks: int):
        self.turns = [threading.Semaphore(0) for _ in range(ranks)]
        self.seconds = [0.0] * ranks
        self.begun = 0.0

    def start(self) -> None:
        self.seconds = [0.0] * len(self.turns)
        self.turns[0].release()

    def await_turn(self, rank: int) -> None:
        self.turns[rank].acquire()
        self.begun = time.perf_counter()

    def end_turn(self, rank: int) -> None:
        self.seconds[rank] += time.perf_counter() - self.begun
        following = (rank + 1) % len(self.turns)
        self.turns[following].release()

    def seconds_so_far(self, rank: int) -> float:
        """Of the rank that runs: those of its earlier turns, and of this one."""
        return self.seconds[rank] + time.perf_counter() - self.begun

    def pass_on(self, rank: int) -> None:
        self.end_turn(rank)
        self.await_turn(rank)


class SilentArena:
    """Rooms without signals, for a device without kernels that signal."""

    tail = None

    def __init__(self, axis: Axis, memory: PeerMemory):
        self.axis = axis
        self.number = 0
        self.arena_rooms = ArenaRooms(memory.parts, memory.sizes)

    def rooms(self, rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> PeerRooms:
        return self.arena_rooms.of_exchange(self.number, rows, width, dtype, offset)

    def exchange(self, what: str) -> None:
        self.number += 1

    def require_peers(self) -> None: ...


class PlayedArena:
    """An arena whose exchanges pass the turn on."""

    def __init__(self, arena: Arena, order: TurnOrder):
        self.axis = arena.axis
        self.arena = arena
        self.order = order
        self.arena_rooms = arena.arena_rooms
        self.rooms = arena.rooms
        self.require_peers = arena.require_peers

    @property
    def tail(self) -> Any:
        return self.arena.tail

    @property
    def number(self) -> int:
        return self.arena.number

    def exchange(self, what: str) -> None:
        self.arena.exchange(what)
        self.order.pass_on(self.axis.index)


def played_axis(rank: int, ranks: int) -> Axis:
    return Axis("ep", tuple(range(ranks)), rank)


def played_arenas(
    ranks: int,
    room_bytes: int,
    device: torch.device,
    order: TurnOrder,
    kept: int = 0,
    pieces: int = 0,
    signals: bool | None = None,
) -> list[PlayedArena]:
    """The arena of each rank, over the same parts. Flags of pieces are those of the parts themselves. `signals`: there
    are kernels that signal; by default on a GPU."""
    has_signals = device.type == "cuda" if signals is None else signals
    axes = [played_axis(rank, ranks) for rank in range(ranks)]
    sizes = part_sizes(axes[0], room_bytes, kept, pieces)
    parts = [torch.zeros(sizes.total, dtype=torch.uint8, device=device) for _ in axes]
    spare = torch.zeros(sizes.word_bytes, dtype=torch.uint8, device=device)
    arenas: list[PlayedArena] = []
    for axis, part in zip(axes, parts, strict=True):
        words = [words_of(spare, sizes) for _ in axes]
        own_words = words_of(part, sizes)
        own_words[:ranks] = EVERY_SIGNAL
        words[axis.index] = own_words
        memory = PeerMemory(parts, words, sizes)
        arena: Arena = SilentArena(axis, memory)
        if has_signals:
            arena = DeviceArena(axis, memory, PATIENCE)
        arenas.append(PlayedArena(arena, order))
    return arenas


def play_rank(rank: int, work: Callable[[int], Any], order: TurnOrder, ended: SimpleQueue[PlayedEnd]) -> None:
    """The work of one rank, in its turns."""
    order.await_turn(rank)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().query()  # a thread has no device until torch has called it there
    try:
        result = work(rank)
    except Exception as error:
        ended.put((rank, None, error))
        return
    ended.put((rank, result, None))
    order.end_turn(rank)


def stay_on_first_core() -> None:
    """Let this thread run on the first core that its process may use alone, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        first = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {first})


def play_ranks(work: Callable[[int], T], ranks: int, order: TurnOrder) -> list[T]:
    """`work(rank)` for every rank, all of which have the same number of exchanges; results by rank."""
    ended: SimpleQueue[PlayedEnd] = SimpleQueue()
    for rank in range(ranks):
        thread = threading.Thread(target=play_rank, args=(rank, work, order, ended), daemon=True)
        thread.start()
    order.start()
    results: dict[int, T] = {}
    for _ in range(ranks):
        rank, result, error = ended.get()
        if error is not None:
            raise error
        results[rank] = result
    order.turns[0].acquire()  # what the last rank has passed on
    return [results[rank] for rank in range(ranks)]
