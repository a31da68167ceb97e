"""The host pool: bounded host memory for offloaded tensors, taken in slabs and cut into blocks.

A slab is allocated when the first block needs it and stays until the pool ends: pinning memory is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

SLAB_BYTES = 256 * 2**20
ALIGNMENT = 512

Events = tuple[Any, ...]  # behind copies that still read a range


@dataclass(eq=False)
class HostBlock:
    """A range of a slab. `readers`: events of earlier copies out of it, which a writer waits for."""

    slab: Slab
    begin: int
    end: int
    readers: Events = ()

    def bytes(self, count: int) -> Tensor:
        end = self.begin + count
        return self.slab.memory[self.begin : end]


@dataclass(eq=False)
class Slab:
    memory: Tensor
    free: list[HostBlock] = field(default_factory=list[HostBlock])  # by address

    def take(self, count: int) -> HostBlock | None:
        """The first free range that is large enough, cut to size."""
        for place, block in enumerate(self.free):
            end = block.begin + count
            if end > block.end:
                continue
            if end == block.end:
                del self.free[place]
            else:
                self.free[place] = replace(block, begin=end)
            return replace(block, end=end)
        return None

    def give_back(self, block: HostBlock) -> None:
        """Free a range, joined with free neighbours."""
        place = sum(other.begin < block.begin for other in self.free)
        self.free.insert(place, block)
        if place + 1 < len(self.free):
            self.join(place)
        if place > 0:
            self.join(place - 1)

    def join(self, place: int) -> None:
        neighbours = slice(place, place + 2)
        one, two = self.free[neighbours]
        if one.end == two.begin:
            readers = dict.fromkeys(one.readers + two.readers)
            joined = HostBlock(self, one.begin, two.end, tuple(readers))
            self.free[neighbours] = [joined]


class HostPool:
    """Blocks of host memory, `limit` bytes at most. `allocate(bytes)` makes a slab."""

    def __init__(self, limit: int, allocate: Callable[[int], Tensor]):
        self.limit = limit
        self.allocate = allocate
        self.slabs: list[Slab] = []
        self.returned: deque[HostBlock] = deque()  # by any thread, at any time

    @property
    def allocated(self) -> int:
        return sum(slab.memory.numel() for slab in self.slabs)

    def take(self, nbytes: int) -> HostBlock | None:
        """A block of so many bytes, or None where the limit is reached."""
        while self.returned:
            block = self.returned.popleft()
            block.slab.give_back(block)
        count = rounded_up(nbytes, ALIGNMENT)
        for slab in self.slabs:
            block = slab.take(count)
            if block is not None:
                return block
        slab = self.new_slab(count)
        if slab is None:
            return None
        return slab.take(count)

    def new_slab(self, count: int) -> Slab | None:
        left = self.limit - self.allocated
        wanted = max(SLAB_BYTES, count)
        size = min(wanted, left - left % ALIGNMENT)
        if size < count:
            return None
        memory = self.allocate(size)
        slab = Slab(memory)
        whole = HostBlock(slab, 0, size)
        slab.free.append(whole)
        self.slabs.append(slab)
        return slab

    def give_back(self, block: HostBlock) -> None:
        self.returned.append(block)


def rounded_up(count: int, multiple: int) -> int:
    missing = -count % multiple
    return count + missing
