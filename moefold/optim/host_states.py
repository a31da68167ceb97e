"""Optimizer states in host memory: chunks of them visit the device for the update (`optim.states host`).

    to the device    chunk 1 | chunk 2 | chunk 3 | ...             | chunk 1 of the next step | chunk 2 | ...
    updates                    chunk 1 | chunk 2 | chunk 3 | ...
    to the host                          chunk 1 | chunk 2 | chunk 3 | ...
    compute          backward  | forward of layer 0 | layer 1 | ...              | backward

Chunks lie in slots of device memory that are allocated once. Copies and updates run on streams of their own, launched
by a thread. Chunks come in the same order in every step, so those of the next step are fetched ahead into slots that
are free, while forward and backward run. On a CPU the same chunks are copied one after another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from moefold.anatomy.visiting_states import CHUNK_ELEMENTS, LEAST_SLOTS, slot_count
from moefold.kernels.optimizer.state_blocks import STATE_BLOCK
from moefold.layout.pinned_memory import pinned_copy
from moefold.shard.block_values import FlatValues
from moefold.shard.buckets import round_up

POLL_SECONDS = 1e-4  # while copies of some milliseconds are under way
ALIGNMENT = 256  # bytes, of tensors in a slot
assert CHUNK_ELEMENTS % STATE_BLOCK == 0

Chunk = Sequence[Tensor]  # host tensors that are updated together
Tensors = list[Tensor]
Work = Callable[[int, Tensors], None]
ChunkKey = tuple[int, int]  # the owner of a chunk, and its number


def values_on_host(values: FlatValues) -> FlatValues:
    if isinstance(values, Tensor):
        return pinned_copy(values)
    return values.moved(pinned_copy)


def chunk_windows(size: int, chunk: int) -> list[slice]:
    windows: list[slice] = []
    for first in range(0, size, chunk):
        last = min(size, first + chunk)
        window = slice(first, last)
        windows.append(window)
    return windows


class Slot:
    """Device memory of one chunk, and the events after which that is there, is updated, and has left."""

    def __init__(self, size: int, device: torch.device):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors: Tensors = []
        self.has_arrived: Event | None = None
        self.is_updated: Event | None = None
        self.is_free: Event | None = None

    def places(self, chunk: Chunk) -> Iterator[Tensor]:
        """Memory for each tensor of a chunk."""
        first = 0
        for tensor in chunk:
            last = first + tensor.nbytes
            place = self.memory[first:last]
            yield place.view(tensor.dtype)
            first = round_up(last, ALIGNMENT)


class UpdateEnd:
    """The end of an update that a thread launches: on the host once all of it is launched, on the device an event."""

    def __init__(self) -> None:
        self.is_launched = threading.Event()
        self.event: Event | None = None
        self.error: BaseException | None = None

    def note_launched(self, event: Event | None, error: BaseException | None = None) -> None:
        self.event = event
        self.error = error
        self.is_launched.set()

    def wait(self) -> None:
        """Let the present stream wait for the update."""
        self.is_launched.wait()
        if self.error is not None:
            raise RuntimeError(f"an update with states on the host failed: {self.error}") from self.error
        if self.event is not None:
            self.event.wait()


class ChunkVisit(NamedTuple):
    """The update of one chunk: its key, its tensors on the host, the work, an event before which that must not begin,
    and whom to tell when it is launched."""

    key: ChunkKey
    chunk: Chunk
    work: Work
    is_ready: Event | None
    ends: UpdateEnd | None


class HostStream:
    """The way of chunks from host memory to a device and back. `window_gib`: device memory for chunks that are under
    way.

    A thread launches copies and updates, and ends when nothing is left to do. One chunk each way is under way at a
    time: a copy engine serves other streams only when the present one has nothing left, and a step begins and ends
    with small copies, of its numbers and of the loss."""

    def __init__(self, device: torch.device, window_gib: float = 0.0):
        self.device = device
        self.window_gib = window_gib
        self.slot_size = 0
        self.expected = 0  # chunks of a step
        self.slots: list[Slot] = []
        self.free: deque[Slot] = deque()  # of which no chunk waits for its update
        self.fetched: dict[ChunkKey, Slot] = {}  # whose chunks are not updated yet
        self.updated: deque[tuple[ChunkKey, Slot]] = deque()  # chunks that are to leave
        self.arrival: Event | None = None  # of the last chunk on its way to the device
        self.departure: Event | None = None  # likewise to the host
        self.left: dict[ChunkKey, Event | None] = {}  # of each chunk, when it was last in host memory
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.following: dict[ChunkKey, ChunkKey] = {}  # each chunk's next one, as the last steps have shown
        self.last_visited: ChunkKey | None = None
        self.last_fetched: ChunkKey | None = None
        self.visits: deque[ChunkVisit] = deque()
        self.lock = threading.Lock()  # of visits and thread
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.arriving = self.updates = self.leaving = None
        if device.type == "cuda":
            self.arriving = Stream(device)
            self.updates = Stream(device)
            self.leaving = Stream(device)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Announce chunks of every step, before the first visit."""
        self.expected += len(chunks)
        self.slot_size = max([self.slot_size, *map(bytes_of_chunk, chunks)])

    def visit(self, owner: int, chunks: Sequence[Chunk], work: Work) -> UpdateEnd:
        """Have `work` called with the number of each of an owner's chunks and its tensors on the device, which are then
        copied back: on a stream of its own, behind what the present one has been given so far."""
        self.require_health()
        end = UpdateEnd()
        if not chunks:
            end.note_launched(None)
            return end
        self.make_slots(chunks)
        is_ready = record_event(present_stream(self.device))
        last = len(chunks) - 1
        visits: list[ChunkVisit] = []
        for number, chunk in enumerate(chunks):
            key = owner, number
            self.note_visit(key, chunk)
            visit = ChunkVisit(key, chunk, work, is_ready, end if number == last else None)
            visits.append(visit)
        self.begin(visits)
        return end

    def make_slots(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the slots, or larger ones where a chunk does not fit."""
        largest = max([self.slot_size, *map(bytes_of_chunk, chunks)])
        if self.slots and largest <= self.slot_size:
            return
        self.settle()
        self.slot_size = largest
        count = LEAST_SLOTS
        if self.device.type == "cuda":
            count = slot_count(self.expected, largest, self.window_gib)
        self.slots = [Slot(largest, self.device) for _ in range(count)]
        self.free = deque(self.slots)
        if self.arriving is not None:  # work that is under way may still use the memory
            self.arriving.wait_stream(torch.cuda.current_stream(self.device))
        for stream in filter(None, (self.arriving, self.updates, self.leaving)):
            for slot in self.slots:
                slot.memory.record_stream(stream)

    def note_visit(self, key: ChunkKey, chunk: Chunk) -> None:
        self.chunks[key] = chunk
        if self.last_visited is not None:
            self.following[self.last_visited] = key
        self.last_visited = key

    # ---- the thread

    def begin(self, visits: list[ChunkVisit]) -> None:
        with self.lock:
            self.visits.extend(visits)
            if self.thread is not None:
                return
            self.thread = threading.Thread(target=self.launch_all, name="states on the host")
            thread = self.thread
        thread.start()
        if self.device.type != "cuda":
            thread.join()

    @torch.no_grad()
    def launch_all(self) -> None:
        """The body of the thread: launch what can be launched, until nothing is left."""
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread begins on the first device
            while self.launch_next() or self.wait_for_copies() or not self.ends_thread():
                pass
        except BaseException as error:
            self.report_failure(error)

    def launch_next(self) -> bool:
        return self.fetch_next() or self.update_next() or self.send_next()

    def ends_thread(self) -> bool:
        with self.lock:
            if self.visits:
                return False
            self.thread = None
            return True

    def report_failure(self, error: BaseException) -> None:
        with self.lock:
            self.error = error
            for visit in self.visits:
                if visit.ends is not None:
                    visit.ends.note_launched(None, error)
            self.visits.clear()
            self.thread = None

    def require_health(self) -> None:
        """States in host memory are not those of the last step once a copy has failed."""
        if self.error is not None:
            raise RuntimeError(f"a copy of states in host memory failed: {self.error}") from self.error

    def fetch_next(self) -> bool:
        """Begin to copy the chunk that comes next, if a slot is free and the one before is there."""
        key = self.next_key()
        if key is None or not has_happened(self.arrival):
            return False
        slot = self.take_slot(key)
        if slot is None:
            return False
        self.fetch(key, slot)
        self.fetched[key] = slot
        return True

    def next_key(self) -> ChunkKey | None:
        """The chunk of the next visit, or else the one that comes behind the last fetched."""
        key: ChunkKey | None = None
        if self.visits and self.visits[0].key not in self.fetched:
            key = self.visits[0].key
        elif self.last_fetched is not None:
            key = self.following.get(self.last_fetched)
        is_here = key in self.fetched or any(key == leaving for leaving, _ in self.updated)
        return None if is_here else key

    def take_slot(self, key: ChunkKey) -> Slot | None:
        """The slot that has been free for longest, once its chunk has left; for the chunk of the next visit that of
        another one, if need be."""
        is_wanted = bool(self.visits) and self.visits[0].key == key
        if not self.free and is_wanted and self.fetched:
            first_fetched = next(iter(self.fetched))
            self.free.append(self.fetched.pop(first_fetched))
        if not self.free or not has_happened(self.free[0].is_free):
            return None
        return self.free.popleft()

    def fetch(self, key: ChunkKey, slot: Slot) -> None:
        chunk = self.chunks[key]
        wait_for_event(self.arriving, self.left.get(key))
        slot.tensors = list(slot.places(chunk))
        with on_stream(self.arriving):
            copy_all(slot.tensors, chunk)
        slot.has_arrived = record_event(self.arriving)
        self.arrival = slot.has_arrived
        self.last_fetched = key

    def update_next(self) -> bool:
        """Launch the next update, if its chunk is on its way."""
        if not self.visits or self.visits[0].key not in self.fetched:
            return False
        with self.lock:
            visit = self.visits.popleft()
        slot = self.fetched.pop(visit.key)
        wait_for_event(self.updates, visit.is_ready)
        wait_for_event(self.updates, slot.has_arrived)
        _, number = visit.key
        try:
            with on_stream(self.updates):
                visit.work(number, slot.tensors)
        except BaseException as error:
            if visit.ends is not None:
                visit.ends.note_launched(None, error)
            raise
        slot.is_updated = record_event(self.updates)
        self.updated.append((visit.key, slot))
        if visit.ends is not None:
            visit.ends.note_launched(slot.is_updated)
        return True

    def send_next(self) -> bool:
        """Begin to copy the chunk that was updated first to the host, if the one before is there."""
        if not self.updated or not has_happened(self.departure):
            return False
        key, slot = self.updated.popleft()
        wait_for_event(self.leaving, slot.is_updated)
        with on_stream(self.leaving):
            copy_all(self.chunks[key], slot.tensors)
        slot.is_free = self.left[key] = record_event(self.leaving)
        self.departure = slot.is_free
        self.free.append(slot)
        return True

    def wait_for_copies(self) -> bool:
        """Wait for the copy that is in the way of the next one; False if none is."""
        is_due = self.next_key() is not None
        pending = [self.departure] if self.updated else []
        pending += [self.arrival] if is_due else []
        pending += [self.free[0].is_free] if is_due and self.free else []
        open_events = [event for event in pending if event is not None and not event.query()]
        if not open_events:
            return self.can_launch()
        while not any(event.query() for event in open_events):
            if not threading.main_thread().is_alive():
                raise RuntimeError("the process ends")
            time.sleep(POLL_SECONDS)
        return True

    def can_launch(self) -> bool:
        """Whether a copy has ended since the last look."""
        return bool(self.updated) or (self.next_key() is not None and bool(self.free))

    def settle(self) -> None:
        """Wait until host memory has all that was sent back, and forget what was fetched ahead: host memory may
        change."""
        thread = self.thread
        if thread is not None:
            thread.join()
        self.require_health()
        if self.leaving is not None and self.arriving is not None:
            self.leaving.synchronize()
            self.arriving.synchronize()
        self.free.extend(self.fetched.values())
        self.fetched.clear()
        self.last_fetched = None


def copy_all(to: Chunk, sources: Chunk) -> None:
    for tensor, source in zip(to, sources, strict=True):
        tensor.copy_(source, non_blocking=True)


def bytes_of_chunk(chunk: Chunk) -> int:
    total = 0
    for tensor in chunk:
        total += tensor.nbytes + ALIGNMENT
    return total


def present_stream(device: torch.device) -> Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def has_happened(event: Event | None) -> bool:
    return event is None or event.query()


def wait_for_event(stream: Stream | None, event: Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


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
