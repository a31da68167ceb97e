"""Optimizer states in host memory: chunks of them visit the device for the update (`optim.states host`).

    to the device    chunk 1 | chunk 2 | chunk 3
    update                     chunk 1 | chunk 2 | chunk 3
    to the host                          chunk 1 | chunk 2 | chunk 3

Chunks lie in a few slots of device memory that are allocated once. Copies run on streams of their own, between pinned
memory and slots, and nothing waits on the host. On a CPU the same chunks are copied one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from moefold.kernels.optimizer.block_moments import MOMENT_BLOCK
from moefold.optim.moments import Moment
from moefold.shard.buckets import round_up

CHUNK_ELEMENTS = 1 << 24  # a multiple of a block of moments; long enough for copies at full speed
SLOTS = 3  # one arrives, one is updated, one leaves
ALIGNMENT = 256  # bytes, of tensors in a slot
assert CHUNK_ELEMENTS % MOMENT_BLOCK == 0

Chunk = Sequence[Tensor]  # host tensors that are updated together
Tensors = list[Tensor]
Work = Callable[[int, Tensors], None]
FetchedChunk = tuple[Tensors, Event | None]  # tensors on the device, and the end of the copy to them


def empty_on_host(like: Tensor) -> Tensor:
    """Host memory, pinned where a GPU reads it."""
    is_pinned = like.is_cuda
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)


def pinned_copy(x: Tensor) -> Tensor:
    """A copy in host memory."""
    on_host = empty_on_host(x)
    return on_host.copy_(x)


def moment_on_host(moment: Moment) -> Moment:
    if isinstance(moment, Tensor):
        return pinned_copy(moment)
    codes = pinned_copy(moment.codes)
    scales = pinned_copy(moment.scales)
    return replace(moment, codes=codes, scales=scales)


def chunk_windows(size: int, chunk: int) -> list[slice]:
    windows: list[slice] = []
    for first in range(0, size, chunk):
        last = min(size, first + chunk)
        window = slice(first, last)
        windows.append(window)
    return windows


class Slot:
    """Device memory of one chunk. `is_free`: the event after which its last chunk has left."""

    def __init__(self, size: int, device: torch.device):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.is_free: Event | None = None

    def places(self, chunk: Chunk) -> Iterator[Tensor]:
        """Memory for each tensor of a chunk."""
        first = 0
        for tensor in chunk:
            last = first + tensor.nbytes
            place = self.memory[first:last]
            yield place.view(tensor.dtype)
            first = round_up(last, ALIGNMENT)


class HostStream:
    """The way of chunks from host memory to a device and back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.slots: list[Slot] = []
        self.slot_size = 0
        self.arriving: Stream | None = None
        self.leaving: Stream | None = None
        if device.type == "cuda":
            self.arriving = Stream(device)
            self.leaving = Stream(device)

    def visit(self, chunks: Sequence[Chunk], work: Work) -> None:
        """Call `work` with the number of each chunk and its tensors on the device, which are then copied back."""
        if not chunks:
            return
        largest = max(map(bytes_of_chunk, chunks))
        self.reserve_slots(largest)
        if self.arriving is not None and self.leaving is not None:
            self.arriving.wait_stream(self.leaving)  # the same states may be leaving, from the update before
        first_chunk = chunks[0]
        fetched = self.fetch(0, first_chunk)
        for number, chunk in enumerate(chunks):
            tensors, has_arrived = fetched
            following = number + 1
            if following < len(chunks):
                next_chunk = chunks[following]
                fetched = self.fetch(following, next_chunk)
            self.await_event(has_arrived)
            work(number, tensors)
            self.send_back(number, tensors, chunk)

    def reserve_slots(self, size: int) -> None:
        if size <= self.slot_size:
            return
        self.settle()
        self.slot_size = size
        self.slots = [Slot(size, self.device) for _ in range(SLOTS)]

    def slot_of(self, number: int) -> Slot:
        place = number % SLOTS
        return self.slots[place]

    def fetch(self, number: int, chunk: Chunk) -> FetchedChunk:
        """Begin to copy a chunk to its slot."""
        slot = self.slot_of(number)
        places = list(slot.places(chunk))
        has_left = slot.is_free
        if self.arriving is not None and has_left is not None:
            self.arriving.wait_event(has_left)
        with on_stream(self.arriving):
            copy_all(places, chunk)
        has_arrived = record_event(self.arriving)
        return places, has_arrived

    def send_back(self, number: int, places: Tensors, chunk: Chunk) -> None:
        if self.leaving is not None:
            updates = torch.cuda.current_stream(self.device)
            self.leaving.wait_stream(updates)
        with on_stream(self.leaving):
            copy_all(chunk, places)
        slot = self.slot_of(number)
        slot.is_free = record_event(self.leaving)

    def await_event(self, event: Event | None) -> None:
        if event is not None:
            updates = torch.cuda.current_stream(self.device)
            updates.wait_event(event)

    def settle(self) -> None:
        """Wait until host memory has all that was sent back."""
        if self.leaving is not None:
            self.leaving.synchronize()


def copy_all(to: Chunk, sources: Chunk) -> None:
    for tensor, source in zip(to, sources, strict=True):
        tensor.copy_(source, non_blocking=True)


def bytes_of_chunk(chunk: Chunk) -> int:
    total = 0
    for tensor in chunk:
        total += tensor.nbytes + ALIGNMENT
    return total


def on_stream(stream: Stream | None) -> AbstractContextManager[object]:
    if stream is None:
        return nullcontext()
    return torch.cuda.stream(stream)


def record_event(stream: Stream | None) -> Event | None:
    if stream is None:
        return None
    event = Event()
    event.record(stream)
    return event
