"""Kept rooms: memory of this rank that others write tokens to, and that experts read where it lies.

A room is kept from the plan, which announces it to the ranks that send, until no tensor has its memory any more: behind
backward where an expert's kernel saves its input, or behind the experts where it does not. Each rank chooses among its
own rooms, so ranks need not agree. Where all are in use, tokens go to the room of the turn and are copied from there.

A room is free for kernels that are launched behind those that read it. So these have to be on one stream: there are no
kept rooms where layers run on two lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.comm.arena import ArenaRooms
from moefold.comm.part_sizes import TURNS

NO_ROOM = -1


class KeptRoom:
    """A room that is kept for the first tokens of a plan. `memory`: its bytes, until they are taken; None: there is no
    such room."""

    def __init__(self, number: int, memory: UntypedStorage | None):
        self.number = number
        self.memory = memory
        self.is_taken = False

    def take(self, rows: int, x_TD: Tensor) -> Tensor | None:
        """The first rows of the room, like those of `x_TD`, for the first who asks."""
        memory = self.memory
        self.memory = None
        self.is_taken = True
        if memory is None:
            return None
        width = x_TD.shape[1]
        nothing = x_TD.new_empty(0)
        return nothing.set_(memory, 0, (rows, width), (width, 1))


class KeptRooms:
    """The kept rooms of one rank. `users`: of the memory that each room had when it was last kept."""

    def __init__(self, rooms: ArenaRooms, rank: int):
        part = rooms.parts[rank]
        sizes = rooms.sizes
        self.device = part.device
        self.room_bytes = sizes.room_bytes
        self.first_address = part.data_ptr() + sizes.first_room
        self.numbers = range(TURNS, sizes.rooms)
        self.users: dict[int, StorageWeakRef] = {}

    @property
    def are_there(self) -> bool:
        return len(self.numbers) > 0

    def keep_one(self) -> KeptRoom:
        """A room that nobody uses, or none."""
        for number in self.numbers:
            if not self.is_used(number):
                memory = self.open_room(number)
                self.users[number] = StorageWeakRef(memory)
                return KeptRoom(number, memory)
        return KeptRoom(NO_ROOM, None)

    def is_used(self, number: int) -> bool:
        user = self.users.get(number)
        return user is not None and not user.expired()

    def open_room(self, number: int) -> UntypedStorage:
        """The bytes of a room in a storage of their own, whose life is that of their users."""
        address = self.first_address + number * self.room_bytes
        make = torch._C._construct_storage_from_data_pointer
        return make(address, self.device, self.room_bytes)  # pyright: ignore[reportReturnType]
