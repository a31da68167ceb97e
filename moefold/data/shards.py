"""Shards: the tokens of many documents in one file, read by memory map. Torch-free.

    NAME.tokens   ids, little-endian, u1, u2 or u4; the end token behind every document
    NAME.index    i8 for each document and one more: where documents begin, and where the last one ends;
                  u4 for each 64 KiB of NAME.tokens: its crc32

A block is checked against its crc32 when it is first read, so that damage is found where it is used.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moefold.config.errors import UserError
from moefold.data.document_split import join_documents

BLOCK_BYTES = 1 << 16
REMEDY = "copy the file again, or prepare the data again"


class ShardFacts(NamedTuple):
    """What the index of a folder says of a shard. `crc32` is that of NAME.index."""

    name: str
    documents: int
    tokens: int
    crc32: int


def write_shard(
    folder: Path,
    name: str,
    documents: list[np.ndarray],
    dtype: np.dtype,
    end: int,
) -> ShardFacts:
    """Write documents, each with the end token behind it, as the two files of a shard."""
    ids, starts = join_documents(documents, dtype, end)
    stored_type = dtype.newbyteorder("<")
    raw = ids.astype(stored_type).tobytes()
    bounds = np.append(starts, len(ids))
    blocks = blocks_of(raw)
    checks = [zlib.crc32(block) for block in blocks]
    index = bounds.astype("<i8").tobytes()
    stored_checks = np.asarray(checks, dtype="<u4")
    index += stored_checks.tobytes()
    write_durably(folder / f"{name}.tokens", raw)
    write_durably(folder / f"{name}.index", index)
    check = zlib.crc32(index)
    count = len(documents)
    return ShardFacts(name, count, len(ids), check)


def blocks_of(raw: bytes) -> Iterator[memoryview]:
    view = memoryview(raw)
    for begin in range(0, len(raw), BLOCK_BYTES):
        yield view[begin : begin + BLOCK_BYTES]


def write_durably(path: Path, raw: bytes) -> None:
    """Write a file under its name when its bytes are on the disk, not before."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Shard:
    """An open shard. `bounds`: where documents begin, and the end of the last one."""

    def __init__(
        self,
        folder: Path,
        facts: ShardFacts,
        dtype: np.dtype,
    ):
        self.path = folder / f"{facts.name}.tokens"
        self.bytes = facts.tokens * dtype.itemsize
        self.blocks = -(-self.bytes // BLOCK_BYTES)
        bounds_bytes = 8 * (facts.documents + 1)
        checks_bytes = 4 * self.blocks
        index_path = folder / f"{facts.name}.index"
        require_size(self.path, self.bytes)
        require_size(index_path, bounds_bytes + checks_bytes)
        index = np.memmap(index_path, np.uint8, "r")
        if zlib.crc32(index.data) != facts.crc32:
            raise UserError(f"{index_path} differs from what was written (crc32); {REMEDY}")
        bounds = index[:bounds_bytes]
        checks = index[bounds_bytes:]
        self.bounds = bounds.view("<i8")
        self.checks = checks.view("<u4")
        stored_type = dtype.newbyteorder("<")
        self.ids = np.memmap(self.path, stored_type, "r")
        self.raw = self.ids.view(np.uint8)
        self.is_checked = np.zeros(self.blocks, dtype=bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` to before `stop`, after a check of the blocks that hold them."""
        size = self.ids.itemsize
        first = start * size // BLOCK_BYTES
        last_byte = stop * size - 1
        last = last_byte // BLOCK_BYTES + 1
        for block in range(first, last):
            if not self.is_checked[block]:
                self.check_block(block)
        return self.ids[start:stop]

    def check_block(self, block: int) -> None:
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.bytes)
        content = self.raw[begin:end]
        expected = int(self.checks[block])
        if zlib.crc32(content.data) != expected:
            raise UserError(f"{self.path}: bytes {begin} to {end} differ from what was written (crc32); {REMEDY}")
        self.is_checked[block] = True

    def check_all(self) -> None:
        for block in range(self.blocks):
            self.check_block(block)

    def documents(self) -> Iterator[np.ndarray]:
        """The documents in order, each with its end token."""
        bounds = self.bounds.tolist()
        for start, stop in pairwise(bounds):
            yield self.read(start, stop)


def require_size(path: Path, size: int) -> None:
    """Refuse a file that is absent or of another size than it was written with."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"no file {path}, which the index beside it names; {REMEDY}") from None
    if found != size:
        raise UserError(f"{path} has {found} bytes, but was written with {size}; {REMEDY}")
