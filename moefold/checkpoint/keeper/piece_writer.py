"""The writer of kept files, on the side of ranks: several threads, each with pieces of its own."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moefold.checkpoint.keeper.checksums import PIECE_BYTES, THREADS, joint_checksum


class PieceWriter:
    """Writes a file anew from its beginning, over whatever it has. What is given to `write` must not change before
    `finish`."""

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
            writing = self.pool.submit(write_part, self.file, part, self.size, before)
            self.pieces.append(writing)
            self.size += len(part)
            rest = rest[len(part) :]

    def finish(self) -> int:
        """Wait for the threads; the checksum of the file."""
        with self.pool:
            checksum = joint_checksum(piece.result() for piece in self.pieces)
        os.ftruncate(self.file, self.size)
        return checksum


def write_part(file: int, raw: memoryview, begin: int, before: Future[int] | None) -> int:
    """Write a part of a piece; the checksum of the piece up to its end."""
    written = 0
    while written < len(raw):
        written += os.pwrite(file, raw[written:], begin + written)
    checksum = before.result() if before else 0
    return zlib.crc32(raw, checksum)
