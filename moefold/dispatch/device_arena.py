"""The arena of GPU ranks on one machine: parts in symmetric memory, signals and waits by kernels.

An exchange is the end of the kernel that writes, or a launch of its own where that kernel gives no signals. The host
waits for nothing. What it learns of a rank that gave no signal stands in a few words of pinned memory, which the kernel
writes: the host looks at them in every exchange and with every report.

    waiting kernel    gives up by the device's clock -> names the rank in pinned memory; later exchanges do not wait
    host              sees the name with the next exchange or report, and fails

Exchanges of an arena are issued on one stream, or on streams that wait for each other (those of the two lanes, where a
paired pass computes layers again): the room of an exchange is free once the one before it has been waited for there.
This is up to the caller, and not checked here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.arena import DISPATCHER, ArenaRooms, ArenaUser, lost_peer, words_of
from moefold.comm.host_objects import first_object
from moefold.comm.part_sizes import PartSizes
from moefold.config.errors import UserError
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.layout.axes import Axis
from moefold.layout.peer_rooms import PeerRooms
from moefold.watch.position import note_collective

SHARE_A_CARD = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
T = TypeVar("T")
FURTHER_WORDS = 2  # of a part: the number of exchanges, and whether a rank is lost


class PeerMemory(NamedTuple):
    """The parts of all ranks as this rank sees them, their words, and what keeps them mapped."""

    parts: list[Tensor]
    words: list[Tensor]
    sizes: PartSizes
    owner: object = None


class DeviceArena:
    """`patience`: seconds that a kernel waits for the signal of a rank."""

    def __init__(self, axis: Axis, memory: PeerMemory, patience: float):
        self.axis = axis
        self.memory = memory
        self.number = 0  # of the last exchange that was issued
        self.arena_rooms = ArenaRooms(memory.parts, memory.sizes)
        device = memory.parts[0].device
        addresses = [words.data_ptr() for words in memory.words]
        fault_2 = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.seen_fault_2 = fault_2.numpy()  # read without an op of torch
        finished = torch.zeros(1, dtype=torch.int32, device=device)
        word_addresses = torch.tensor(addresses, device=device)
        own_words = memory.words[axis.index]
        lost = own_words[axis.size + 1 : axis.size + FURTHER_WORDS]
        self.tail = ExchangeTail(word_addresses, fault_2, finished, lost, axis.index, patience)

    def rooms(self, rows: int, width: int, dtype: torch.dtype, offset: int = 0) -> PeerRooms:
        return self.arena_rooms.of_exchange(self.number, rows, width, dtype, offset)

    def exchange(self, what: str) -> None:
        self.require_peers()
        note_collective(what, self.axis.name)
        if not self.tail.is_given:
            self.give_signals()
        self.tail.is_given = False
        self.number += 1

    def give_signals(self) -> None:
        from moefold.kernels.routing.peer_signals_triton import launch_exchange_signals

        launch_exchange_signals(self.tail)

    def require_peers(self) -> None:
        lost = self.seen_fault_2[0]
        if lost:
            number = self.seen_fault_2[1]
            raise lost_peer(self.axis, int(lost) - 1, f"exchange {number}", self.tail.patience)


def part_sizes(axis: Axis, room_bytes: int, kept: int = 0, pieces: int = 0) -> PartSizes:
    """`pieces`: of one sender, each of which has a flag behind the words."""
    flags = axis.size * pieces
    return PartSizes(axis.size + FURTHER_WORDS + flags, room_bytes, kept)


def flag_addresses(memory: PeerMemory, ranks: int) -> Tensor:
    """Where the flags of pieces begin on each rank."""
    first = ranks + FURTHER_WORDS
    flags = [words_of(part, memory.sizes)[first:] for part in memory.parts]
    return torch.tensor([each.data_ptr() for each in flags], device=memory.parts[0].device)


def open_device_memory(
    axis: Axis,
    room_bytes: int,
    device: torch.device,
    kept: int = 0,
    pieces: int = 0,
    user: ArenaUser = DISPATCHER,
) -> PeerMemory:
    """Memory of all ranks of the axis, mapped by each. Every rank calls this; all succeed, or all raise. Ranks agree
    that each has its part before they meet: they would wait for one that has not."""
    sizes = part_sizes(axis, room_bytes, kept, pieces)
    allocate = partial(allocate_part, sizes, device)
    part = succeed_together(allocate, axis, sizes, user)
    map_all = partial(map_parts, axis, sizes, part)
    return succeed_together(map_all, axis, sizes, user)


def succeed_together(work: Callable[[], T], axis: Axis, sizes: PartSizes, user: ArenaUser = DISPATCHER) -> T:
    """The result of the work on memory. Every rank calls this; all succeed, or all raise the first rank's error."""
    result: T | None = None
    problem: UserError | None = None
    try:
        result = work()
    except RuntimeError as error:
        first_line, *_ = str(error).splitlines() or [""]
        problem = UserError(
            f"rank {axis.ranks[axis.index]} cannot share {sizes.total:,} bytes of GPU memory for {user.setting} "
            f"({first_line}); set a smaller train.micro_batch, or {user.instead}"
        )
    first_problem = first_object(problem, axis)
    if first_problem is not None:
        raise first_problem
    assert result is not None
    return result


def allocate_part(sizes: PartSizes, device: torch.device) -> Tensor:
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault(SHARE_A_CARD, "1")  # ranks that share a card, as gloo lets them, are legal here too
    number = torch.cuda.current_device() if device.index is None else device.index
    here = torch.device("cuda", number)
    part = symmetric.empty(sizes.total, dtype=torch.uint8, device=here)
    part.zero_()
    torch.cuda.synchronize(here)  # no rank sees words that are not zero
    return part


def map_parts(axis: Axis, sizes: PartSizes, part: Tensor) -> PeerMemory:
    from torch.distributed import _symmetric_memory as symmetric

    group = dist.group.WORLD if axis.group is None else axis.group
    assert group is not None
    handle = symmetric.rendezvous(part, group)
    parts: list[Tensor] = []
    for rank in range(axis.size):
        parts.append(handle.get_buffer(rank, [sizes.total], torch.uint8))
    words = [words_of(each, sizes) for each in parts]
    return PeerMemory(parts, words, sizes, (part, handle))
