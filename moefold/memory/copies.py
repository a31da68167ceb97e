"""Copies of saved memory between device and host. On CUDA there is one copy stream each way, and streams wait for
events, never the host; on a CPU the same calls copy at once.

    compute    layer 0 | layer 1 | layer 2 | ...            memory of layer 0 is free behind the wait
    to host            | copy 0 -----> wait | copy 1 ...

The device memory of a copy belongs to the stream that was current when the copy was asked for. This stream waits for
the copy before the memory is freed, so that the allocator, which reuses memory in the order of that stream, needs to
know of no other stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.layout.pinned_memory import host_bytes
from moefold.memory.host_pool import Events, HostBlock


class Departure(NamedTuple):
    """A copy to the host, in progress."""

    event: Any = None
    stream: Any = None

    def let_stream_wait(self) -> None:
        """Order what frees the source behind the copy."""
        if self.event is not None:
            self.stream.wait_event(self.event)


class Arrival(NamedTuple):
    """A copy to the device, in progress."""

    memory: Tensor
    event: Any = None
    stream: Any = None

    @property
    def events(self) -> Events:
        """What a writer of the source waits for."""
        if self.event is None:
            return ()
        return (self.event,)

    def take(self) -> Tensor:
        """The memory, for the current stream, which waits for the copy."""
        memory = self.memory
        if self.event is None:
            return memory
        current = torch.cuda.current_stream(memory.device)
        current.wait_event(self.event)
        if current != self.stream:
            memory.record_stream(current)
        return memory

    def let_stream_wait(self) -> None:
        """Order what frees the memory behind the copy."""
        if self.event is not None:
            self.stream.wait_event(self.event)


class Copier(Protocol):
    def allocate(self, nbytes: int) -> Tensor:
        """Host memory that the copies can use."""
        ...

    def to_host(self, source: Tensor, block: HostBlock) -> Departure: ...

    def to_device(self, block: HostBlock, nbytes: int, after: Departure) -> Arrival:
        """Copy a block that a departure has filled to new memory. The block may be written again behind
        `Arrival.event`."""
        ...


class PlainCopier:
    """Copies that end at once."""

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def to_host(self, source: Tensor, block: HostBlock) -> Departure:
        nbytes = source.numel()
        on_host = block.bytes(nbytes)
        on_host.copy_(source)
        return Departure()

    def to_device(self, block: HostBlock, nbytes: int, after: Departure) -> Arrival:
        on_host = block.bytes(nbytes)
        memory = on_host.clone()
        return Arrival(memory)


class CudaCopier:
    def __init__(self, device: torch.device):
        self.device = device
        self.out_stream = torch.cuda.Stream(device)
        self.in_stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, pinned=True)

    def to_host(self, source: Tensor, block: HostBlock) -> Departure:
        current = torch.cuda.current_stream(self.device)
        self.out_stream.wait_stream(current)
        for event in block.readers:
            self.out_stream.wait_event(event)
        nbytes = source.numel()
        on_host = block.bytes(nbytes)
        with torch.cuda.stream(self.out_stream):
            on_host.copy_(source, non_blocking=True)
        has_left = self.out_stream.record_event()
        return Departure(has_left, current)

    def to_device(self, block: HostBlock, nbytes: int, after: Departure) -> Arrival:
        device = self.device
        current = torch.cuda.current_stream(device)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.in_stream.wait_stream(current)  # earlier work of the current stream may still use this memory
        self.in_stream.wait_event(after.event)
        on_host = block.bytes(nbytes)
        with torch.cuda.stream(self.in_stream):
            memory.copy_(on_host, non_blocking=True)
        has_arrived = self.in_stream.record_event()
        return Arrival(memory, has_arrived, current)


def copier_for(device: torch.device) -> Copier:
    if device.type == "cuda":
        return CudaCopier(device)
    return PlainCopier()
