"""Checksums of kept files: of each piece by itself, so that several threads write a file, or read it, side by side."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

PIECE_BYTES = 16 << 20
THREADS = min(8, os.cpu_count() or 1)  # neither copying nor checksums hold the GIL
BYTES_OF_CHECKSUM = 4


def joint_checksum(pieces: Iterable[int]) -> int:
    """The checksum of a file from those of its pieces."""
    raw = [piece.to_bytes(BYTES_OF_CHECKSUM, "little") for piece in pieces]
    return zlib.crc32(b"".join(raw))


def file_checksum(file: int) -> int:
    size = os.fstat(file).st_size
    if not size:
        return joint_checksum([])
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
        return checksum_of(view)


def checksum_of(whole: memoryview) -> int:
    begins = range(0, len(whole), PIECE_BYTES)
    with ThreadPoolExecutor(THREADS) as pool:
        pieces = pool.map(partial(piece_checksum, whole), begins)
        return joint_checksum(pieces)


def piece_checksum(whole: memoryview, begin: int) -> int:
    with whole[begin : begin + PIECE_BYTES] as piece:
        return zlib.crc32(piece)
