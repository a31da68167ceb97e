"""The writer of kept files, on the side of ranks: several threads, each with pieces of its own."""

from __future__ import annotations

import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from moefold.checkpoint.keeper.checksums import PIECE_BYTES, THREADS, joint_checksum


class PieceWriter:
    """Writes a file in memory by several threads. What is given to `write` must not change before `finish`."""

    def __init__(self, file: int):
        self.file = file
        self.size = 0
        self.pool = ThreadPoolExecutor(THREADS)
        self.pieces: list[Future[int]] = []

    def write(self, raw: Any) -> None:
        rest = memoryview(raw)
        while rest:
            begun = self.size % PIECE_BYTES
            part = rest[: PIECE_BYTES - begun]
            before = self.pieces.pop() if begun else None
            self.size += len(part)
            os.ftruncate(self.file, self.size)
            writing = self.pool.submit(write_part, self.file, part, self.size, before)
            self.pieces.append(writing)
            rest = rest[len(part) :]

    def finish(self) -> int:
        """Wait for the threads; the checksum of the file."""
        with self.pool:
            return joint_checksum(piece.result() for piece in self.pieces)


def write_part(file: int, raw: memoryview, end: int, before: Future[int] | None) -> int:
    """Write a part of a piece, which ends there; the checksum of the piece up to its end. Through mapped pages: the
    system lets one thread at a time write to a file."""
    begin = end - len(raw)
    first = begin - begin % PIECE_BYTES
    with mmap.mmap(file, end - first, offset=first) as pages:
        place = np.frombuffer(pages, dtype=np.uint8, offset=begin - first)
        place[:] = np.frombuffer(raw, dtype=np.uint8)
        del place  # which keeps the pages mapped
    checksum = before.result() if before else 0
    return zlib.crc32(raw, checksum)
