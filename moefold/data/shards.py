"""Shards: the tokens of many documents in one file, read by memory map. Torch-free.

    NAME.tokens   ids, little-endian, u1, u2 or u4; the end token behind every document
    NAME.mask     where not all tokens are trained: a bit for each token, 1 for those that are, the lowest bit first
    NAME.index    i8 for each document and one more: where documents begin, and where the last one ends;
                  u4 for each 64 KiB of NAME.tokens, and then of NAME.mask: its crc32

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
from moefold.data.document_split import DocumentTokens, join_documents

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
    documents: list[DocumentTokens],
    dtype: np.dtype,
    end: int,
) -> ShardFacts:
    """Write documents, each with the end token behind it, as the files of a shard."""
    joined = join_documents(documents, dtype, end)
    count = len(joined.tokens)
    stored_type = dtype.newbyteorder("<")
    raw = joined.tokens.astype(stored_type).tobytes()
    bounds = np.append(joined.starts, count)
    checks = block_checks(raw)
    write_durably(folder / f"{name}.tokens", raw)
    if joined.mask is not None:
        bits = np.packbits(joined.mask, bitorder="little").tobytes()
        checks += block_checks(bits)
        write_durably(folder / f"{name}.mask", bits)
    stored_checks = np.asarray(checks, dtype="<u4")
    index = bounds.astype("<i8").tobytes()
    index += stored_checks.tobytes()
    write_durably(folder / f"{name}.index", index)
    check = zlib.crc32(index)
    return ShardFacts(name, len(documents), count, check)


def block_checks(raw: bytes) -> list[int]:
    return [zlib.crc32(block) for block in blocks_of(raw)]


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


class CheckedFile:
    """A mapped file of so many bytes, whose blocks are compared with their crc32 when they are first read."""

    def __init__(
        self,
        path: Path,
        size: int,
        checks: np.ndarray,
    ):
        require_size(path, size)
        self.path = path
        self.size = size
        self.checks = checks
        self.raw = np.memmap(path, np.uint8, "r")
        self.is_checked = np.zeros(len(checks), dtype=bool)

    def check(self, begin: int, end: int) -> None:
        """Check the blocks that hold the bytes from `begin` to before `end`."""
        first = begin // BLOCK_BYTES
        last = (end - 1) // BLOCK_BYTES + 1
        for block in range(first, last):
            if not self.is_checked[block]:
                self.check_block(block)

    def check_block(self, block: int) -> None:
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.size)
        content = self.raw[begin:end]
        expected = int(self.checks[block])
        if zlib.crc32(content.data) != expected:
            raise UserError(f"{self.path}: bytes {begin} to {end} differ from what was written (crc32); {REMEDY}")
        self.is_checked[block] = True


def mask_bytes(tokens: int) -> int:
    return -(-tokens // 8)


class Shard:
    """An open shard. `bounds`: where documents begin, and the end of the last one."""

    def __init__(
        self,
        folder: Path,
        facts: ShardFacts,
        dtype: np.dtype,
        has_mask: bool = False,
    ):
        sizes = {"tokens": facts.tokens * dtype.itemsize}
        if has_mask:
            sizes["mask"] = mask_bytes(facts.tokens)
        self.bytes = sum(sizes.values())
        bounds_bytes = 8 * (facts.documents + 1)
        blocks = {ending: -(-size // BLOCK_BYTES) for ending, size in sizes.items()}
        checks_bytes = 4 * sum(blocks.values())
        index_path = folder / f"{facts.name}.index"
        require_size(index_path, bounds_bytes + checks_bytes)
        index = np.memmap(index_path, np.uint8, "r")
        if zlib.crc32(index.data) != facts.crc32:
            raise UserError(f"{index_path} differs from what was written (crc32); {REMEDY}")
        self.bounds = index[:bounds_bytes].view("<i8")
        checks = index[bounds_bytes:].view("<u4")
        self.files: dict[str, CheckedFile] = {}
        for ending, size in sizes.items():
            count = blocks[ending]
            path = folder / f"{facts.name}.{ending}"
            self.files[ending] = CheckedFile(path, size, checks[:count])
            checks = checks[count:]
        stored_type = dtype.newbyteorder("<")
        self.tokens = self.files["tokens"]
        self.ids = self.tokens.raw.view(stored_type)
        self.mask = self.files.get("mask")

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` to before `stop`, after a check of the blocks that hold them."""
        size = self.ids.itemsize
        self.tokens.check(start * size, stop * size)
        return self.ids[start:stop]

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        """Which of the tokens from `start` to before `stop` are trained; all where the shard has no mask."""
        if self.mask is None:
            return np.ones(stop - start, dtype=bool)
        first = start // 8
        behind = mask_bytes(stop)
        self.mask.check(first, behind)
        bits = np.unpackbits(self.mask.raw[first:behind], bitorder="little")
        begin = start - 8 * first
        here = bits[begin : begin + stop - start]
        return here.astype(bool)

    def check_all(self) -> None:
        for file in self.files.values():
            file.check(0, file.size)

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
