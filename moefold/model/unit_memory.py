"""Memory of units that come and go: buffers that are made once, of which a unit has one end while it is here.

    buffer   | unit 0 ------------>        <------ unit 1 |     as large as the two largest units, so that any two fit,
    later    | unit 2 ------>              <------ unit 1 |     one from each end, whatever their sizes are

No step asks the allocator for memory that weights are brought to, the bytes of units are bounded on a GPU too, where a
stream may still read what the host has freed, and gathers write to the same few addresses. A unit's tensors keep their
storage objects, which get other memory: views of them, also those that autograd has saved, are right whenever the unit
is here.

Torch 2.11 cannot give a storage memory that is there already. There each unit has memory of the allocator's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; what the allocator of a GPU aligns to at least
UNITS_OF_A_BUFFER = 2

Tensors = Sequence[Tensor]
Events = Sequence[Any]  # of streams of a GPU


def bytes_of_unit(tensors: Iterable[Tensor]) -> int:
    """The bytes that these tensors take of a buffer."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def aligned(size: int) -> int:
    pieces = -(-size // ALIGNMENT)
    return pieces * ALIGNMENT


class UnitMemory(ABC):
    """What gives units memory. Their tensors have none in between."""

    outlives_units = False  # whether memory is there when no unit has it, so that its last readers must be awaited

    @abstractmethod
    def lend(self, unit: str, tensors: Tensors) -> Events:
        """Give the tensors of a unit memory. Events, which must be awaited before it is written."""

    @abstractmethod
    def take_back(self, unit: str, tensors: Tensors, readers: Events) -> None:
        """Take the memory of a unit. `readers`: events behind what reads the unit on streams of a GPU."""


class AllocatedMemory(UnitMemory):
    """Memory of the allocator's, asked for when a unit comes."""

    def lend(self, unit: str, tensors: Tensors) -> Events:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storage.resize_(tensor.nbytes)
        return ()

    def take_back(self, unit: str, tensors: Tensors, readers: Events) -> None:
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)


@dataclass
class BufferEnd:
    """One end of a buffer: the unit that has it lies at the beginning, or before the end. `last_reads`: events behind
    the reads of the last unit of either end, which the buffer's ends share."""

    buffer: Tensor
    is_first: bool
    last_reads: dict[bool, Events]
    unit: str | None = None
    without_memory: list[Any] = field(default_factory=list)  # what the unit's storages were before

    def address(self, size: int) -> int:
        begin = self.buffer.data_ptr()
        if self.is_first:
            return begin
        return begin + self.buffer.nbytes - size


@dataclass
class UnitBuffers(UnitMemory):
    """Buffers of `size` bytes each: those of the two largest units."""

    size: int
    ends: list[BufferEnd] = field(default_factory=list)
    outlives_units = True

    def lend(self, unit: str, tensors: Tensors) -> Events:
        if all(end.unit is not None for end in self.ends):
            self.add_buffer(tensors[0].device)
        end = next(end for end in self.ends if end.unit is None)
        end.unit = unit
        size = bytes_of_unit(tensors)
        address = end.address(size)
        for tensor in tensors:
            lent = bytes_from(address, tensor)
            swap_memory(tensor, lent)
            end.without_memory.append(lent)
            address += aligned(tensor.nbytes)
        events: list[Any] = []
        for last in end.last_reads.values():
            events += last
        return events

    def add_buffer(self, device: torch.device) -> None:
        buffer = torch.empty(self.size, dtype=torch.uint8, device=device)
        last_reads: dict[bool, Events] = {}
        for is_first in (True, False):
            end = BufferEnd(buffer, is_first, last_reads)
            self.ends.append(end)

    def take_back(self, unit: str, tensors: Tensors, readers: Events) -> None:
        end = next(end for end in self.ends if end.unit == unit)
        for tensor, before in zip(tensors, end.without_memory, strict=True):
            swap_memory(tensor, before)
        end.without_memory.clear()
        end.unit = None
        end.last_reads[end.is_first] = readers

    @property
    def nbytes(self) -> int:
        return self.size * len(self.ends) // UNITS_OF_A_BUFFER


def bytes_from(address: int, like: Tensor) -> Any:
    """A storage of as many bytes as a tensor has, which are not its own."""
    construct: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
    return construct(address, like.device, like.nbytes)


def swap_memory(tensor: Tensor, other: Any) -> None:
    """Let the storage of a tensor have the memory of another storage, and that one its."""
    storage: Any = tensor.untyped_storage()
    storage._swap_data_ptr_(other)


def can_give_memory() -> bool:
    """Whether this torch can give a storage memory that is there already: 2.13 can."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def make_unit_memory(sizes: Iterable[int]) -> UnitMemory:
    """Memory for units of these bytes."""
    if not can_give_memory():
        return AllocatedMemory()
    largest = sorted(sizes)[-UNITS_OF_A_BUFFER:]
    return UnitBuffers(sum(largest))
