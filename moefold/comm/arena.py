"""The arena: memory of every rank of an axis that all of them read and write, and the signals between them.

Every rank owns a part of the arena. It begins with one word for each rank: the number of the last exchange for which
that rank has signalled. Behind the words lie two rooms, which exchanges use in turns, and further ones that a rank
keeps for itself and lets others write to (dispatch/kept_rooms.py).

    exchange e     write to rooms of turn e % 2, own or others'  ->  signal all  ->  wait for all  ->  read them

Nobody writes to a room that is still read: who writes in exchange e + 2 has waited for the signals of e + 1, which
every rank gives behind its reads of e. So there is no barrier, and a rank is at most one exchange ahead of another.

On a CPU the arena is a file in shared memory, which is unlinked as soon as all ranks have opened it. On GPUs it is
symmetric memory, and kernels signal and wait (dispatch/device_arena.py).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.comm.blocked_times import blocked
from moefold.comm.host_objects import broadcast_object, first_object
from moefold.comm.part_sizes import TURNS, PartSizes
from moefold.config.errors import RunFailure, UserError
from moefold.layout.axes import Axis
from moefold.layout.peer_rooms import PeerRooms
from moefold.watch.position import note_collective

SHARED_MEMORY = Path("/dev/shm")
EAGER_LOOKS = 200  # at a signal, before a look is followed by a short sleep
SLEEP_SECONDS = 5e-5

FENCE = threading.Lock()


class ArenaUser(NamedTuple):
    """What has an arena, as messages name it: the setting, the axes of its ranks, and what to do without it."""

    setting: str
    axes: str
    instead: str


DISPATCHER = ArenaUser("parallel.dispatcher = symmetric", "ep x etp", "set parallel.dispatcher to dedup")
PROJECTIONS = ArenaUser("parallel.tiles = projections", "tp", "leave projections out of parallel.tiles")
HEADS = ArenaUser("parallel.tiles = heads", "cp", "leave heads out of parallel.tiles")


class Arena(Protocol):
    """Rooms of all ranks of an axis, and exchanges between them."""

    axis: Axis
    arena_rooms: ArenaRooms

    @property
    def number(self) -> int:
        """The number of the last exchange."""
        ...

    @property
    def tail(self) -> Any:
        """What a kernel needs to give the signals of the next exchange; None: no kernel can."""
        ...

    def rooms(self, rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> PeerRooms:
        """The room of each rank for the next exchange, as a matrix that begins at an offset in bytes."""
        ...

    def exchange(self, what: str) -> None:
        """Let the others read what this rank has written, and wait until all have written. Ends the turn."""
        ...

    def require_peers(self) -> None:
        """Fail if a signal of another rank did not come, as far as the host knows without a wait."""
        ...


def order_memory() -> None:
    """A full memory fence. Processors such as Arm's reorder plain loads and stores of one thread; a release of a lock,
    followed by an acquire, keeps all that is before in front of all that is behind."""
    with FENCE:
        pass
    with FENCE:
        pass


def words_of(part: Tensor, sizes: PartSizes) -> Tensor:
    """The words of a rank's part."""
    return part[: sizes.word_bytes].view(torch.int64)


class ArenaRooms:
    """The rooms in the parts of all ranks, as matrices. They are made once for each shape."""

    def __init__(self, parts: Sequence[Tensor], sizes: PartSizes):
        self.parts = parts
        self.sizes = sizes
        self.known: dict[tuple[int, int, int, int, torch.dtype], PeerRooms] = {}
        self.known_together: dict[tuple[int, int, torch.dtype], PeerRooms] = {}

    def of_exchange(self, number: int, rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> PeerRooms:
        turn = number % TURNS
        key = (turn, offset, rows, width, dtype)
        if key not in self.known:
            self.known[key] = self.view(turn, offset, rows, width, dtype)
        return self.known[key]

    def view(self, turn: int, offset: int, rows: int, width: int, dtype: torch.dtype) -> PeerRooms:
        size = rows * width * dtype.itemsize
        rooms: list[Tensor] = []
        for part in self.parts:
            room = part[self.sizes.bytes_of_room(turn, size, offset)]
            rooms.append(room.view(dtype).view(rows, width))
        return PeerRooms(rooms)

    def together(self, rows: int, width: int, dtype: torch.dtype) -> PeerRooms:
        """For each rank all its rooms, (rooms, rows, width)."""
        key = (rows, width, dtype)
        if key not in self.known_together:
            rooms = [self.view_together(part, rows, width, dtype) for part in self.parts]
            self.known_together[key] = PeerRooms(rooms)
        return self.known_together[key]

    def view_together(self, part: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        sizes = self.sizes
        sizes.bytes_of_room(0, rows * width * dtype.itemsize)  # or fail
        all_rooms = part[sizes.first_room : sizes.total].view(dtype)
        each = all_rooms.view(sizes.rooms, -1)
        return each[:, : rows * width].unflatten(1, (rows, width))


class SharedArena:
    """The arena of CPU ranks on one machine. `room_bytes`: of one room. `patience`: seconds that a rank waits for the
    signal of another before it fails with the name of that rank. `kept`: rooms that are kept. `user`: for messages."""

    tail = None

    def __init__(self, axis: Axis, room_bytes: int, patience: float, kept: int = 0, user: ArenaUser = DISPATCHER):
        self.axis = axis
        self.patience = patience
        self.number = 0  # of the last exchange
        sizes = PartSizes(axis.size, room_bytes, kept)
        memory = open_shared_memory(axis, sizes.total * axis.size, user)
        parts = memory.view(axis.size, sizes.total)
        self.arena_rooms = ArenaRooms(list(parts), sizes)
        words = parts[:, : sizes.word_bytes].view(torch.int64)
        self.words = words.numpy()  # [i, j]: what rank j has signalled to rank i; read without an op of torch

    def rooms(self, rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> PeerRooms:
        return self.arena_rooms.of_exchange(self.number, rows, width, dtype, offset)

    def require_peers(self) -> None:
        """Nothing is left to be seen: every exchange has waited."""

    def exchange(self, what: str) -> None:
        note_collective(what, self.axis.name)
        number = self.number + 1
        order_memory()
        self.words[:, self.axis.index] = number
        with blocked():
            for peer in range(self.axis.size):
                self.wait_for(peer, number, what)
        order_memory()
        self.number = number

    def wait_for(self, peer: int, number: int, what: str) -> None:
        own_words = self.words[self.axis.index]
        begun = time.monotonic()
        looks = 0
        while own_words[peer] < number:
            waited = time.monotonic() - begun
            if waited > self.patience:
                raise lost_peer(self.axis, peer, what, self.patience)
            looks += 1
            time.sleep(0 if looks < EAGER_LOOKS else SLEEP_SECONDS)


def lost_peer(axis: Axis, peer: int, what: str, patience: float) -> RunFailure:
    rank = axis.ranks[peer]
    return RunFailure(
        f"rank {rank} gave no signal of {what} over {axis.name} within {patience:g} s (train.slow_timeout): it has "
        "ended or hangs; continue from the last checkpoint with --resume auto"
    )


def open_shared_memory(axis: Axis, size: int, user: ArenaUser = DISPATCHER) -> Tensor:
    """Bytes that all ranks of the axis share. Every rank calls this; all succeed, or all raise the same error."""
    name: str | None = None
    problem: UserError | None = None
    if axis.index == 0:
        try:
            name = create_shared_file(size)
        except OSError as error:
            problem = UserError(
                f"{SHARED_MEMORY} has no {size:,} bytes for {user.setting} ({error.strerror}); make room there, set a "
                f"smaller train.micro_batch, or {user.instead}"
            )
    name = broadcast_object(name, axis)
    memory = torch.empty(0, dtype=torch.uint8)
    if name is not None:
        try:
            memory = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            rank = axis.ranks[axis.index]
            problem = UserError(
                f"rank {rank} cannot open {name} of rank {axis.ranks[0]} ({error}); {user.setting} needs the ranks of "
                f"{user.axes} on one machine; {user.instead}"
            )
    first_problem = first_object(problem, axis)
    if axis.index == 0 and name is not None:
        os.unlink(name)
    if first_problem is not None:
        raise first_problem
    return memory


def create_shared_file(size: int) -> str:
    """A file of zeros in shared memory. Its memory is taken now: a write to a page that is not there would end the
    process."""
    descriptor, name = tempfile.mkstemp(prefix="moefold-arena-", dir=SHARED_MEMORY)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    return name
