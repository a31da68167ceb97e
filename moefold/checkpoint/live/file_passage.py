"""The passage of a rank's file through its host window, once for each save.

filler     | fill cut 0 | 1 | 2 | 3 |      | 4 |       | 5 |    as far ahead as the window has room
writer                  | write 0, hash it | write 1   | ...
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from moefold.checkpoint.format.ledger import HASH_PIECE_BYTES, PieceDigests
from moefold.checkpoint.format.manifest import sha256_hex
from moefold.checkpoint.format.safetensors_header import LENGTH_BYTES
from moefold.checkpoint.format.storage import StoragePath, write_synced_pieces
from moefold.checkpoint.live.copy_lanes import CopyLanes
from moefold.checkpoint.live.host_window import HostWindow, Parts
from moefold.checkpoint.live.rank_file import PieceSpan, WrittenFile, spans_inside

HASH_THREADS = min(8, os.cpu_count() or 1)  # writing needs no core, and neither writing nor hashing holds the GIL
NICE_STEPS = 10  # by which hashing threads are below the training in priority

PieceKey = tuple[str, int]  # a tensor and the piece's first element
Hashers = dict[PieceKey, Any]  # objects of hashlib
PieceBytes = tuple[PieceSpan, memoryview]  # a piece, and some of its bytes, or all


class FilePassage:
    """A save of a rank's file. `copied` is set when tensors may change: where the windows of all ranks hold their
    files, when the last bytes of this one have left the device. Leaving the context ends the passage, also where the
    file was not written."""

    def __init__(self, window: HostWindow, parts: Parts, lanes: CopyLanes, copied: threading.Event):
        self.window = window
        self.fill = partial(window.fill, parts=parts, lanes=lanes)
        self.copied = copied
        self.filler = ThreadPoolExecutor(1)
        self.not_begun = iter(range(len(window.cuts)))
        self.filling: deque[Future[None]] = deque()
        for _ in range(window.rooms):
            self.fill_next()

    def __enter__(self) -> FilePassage:
        return self

    def __exit__(self, *_: object) -> None:
        self.filler.shutdown(cancel_futures=True)

    def fill_next(self) -> None:
        """Fill the room of the next cut, when those before are filled. What was there is not needed any more."""
        number = next(self.not_begun, None)
        if number is not None:
            filling = self.filler.submit(self.fill_room, number)
            self.filling.append(filling)

    def fill_room(self, number: int) -> None:
        self.fill(number)
        if self.window.holds_file and number + 1 == len(self.window.cuts):
            self.copied.set()

    def finish(self) -> None:
        """All ranks have written their files. A rank that has copied before others waits for them here: beyond, it
        would wait for them in the midst of a step, and their slow disk would look like a hang."""
        self.copied.set()

    def wait_until_filled(self) -> None:
        """Wait until every room is filled."""
        for filling in self.filling:
            filling.result()

    def write_file(self, folder: StoragePath) -> WrittenFile | None:
        """Write the file and hash its pieces. None if other ranks write everything that this rank holds."""
        file = self.window.file
        if not file.chunks:
            return None
        digests: PieceDigests = {}
        with ThreadPoolExecutor(HASH_THREADS, initializer=lower_priority) as pool:
            cuts = self.hashed_cuts(pool, digests)
            write_synced_pieces(folder / file.name, cuts)
        sha256 = sha256_hex(file.header[LENGTH_BYTES:])
        return WrittenFile(file.name, file.size, sha256, digests)

    def hashed_cuts(self, pool: ThreadPoolExecutor, digests: PieceDigests) -> Iterator[memoryview]:
        """The cuts for the writer. While one is written, threads hash its pieces into `digests`. A piece that goes on
        in the next cut has its digest from there."""
        begun: Hashers = {}
        for number in range(len(self.window.cuts)):
            filled = self.filling.popleft()
            filled.result()
            raw = self.window.room(number).numpy().data
            batches = hash_batches(self.pieces_of_cut(number, raw))
            hashing = [pool.submit(hash_pieces_further, begun, batch) for batch in batches]
            yield raw
            begun = {}
            for batch in hashing:
                begun |= batch.result()
            for key, hasher in begun.items():
                digests[key] = hasher.digest()
            self.fill_next()

    def pieces_of_cut(self, number: int, raw: memoryview) -> Iterator[PieceBytes]:
        begin, end = self.window.cuts[number]
        for piece, first, last in spans_inside(self.window.file.pieces, begin, end):
            yield piece, raw[first - begin : last - begin]


def hash_batches(pieces: Iterable[PieceBytes]) -> Iterator[list[PieceBytes]]:
    """Small pieces in batches: a thread gets a few MiB at a time."""
    batch: list[PieceBytes] = []
    size = 0
    for piece, raw in pieces:
        batch.append((piece, raw))
        size += len(raw)
        if size >= HASH_PIECE_BYTES:
            yield batch
            batch = []
            size = 0
    yield batch


def hash_pieces_further(begun: Hashers, pieces: Sequence[PieceBytes]) -> Hashers:
    """Hash pieces whole, or those that have begun in an earlier cut further."""
    hashers: Hashers = {}
    for piece, raw in pieces:
        key = piece.name, piece.first
        hasher = begun.get(key) or hashlib.sha256()
        hasher.update(raw)
        hashers[key] = hasher
    return hashers


def lower_priority() -> None:
    """Lower this hashing thread's priority (Linux, best effort)."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        lowered = min(19, own + NICE_STEPS)
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, lowered)
