"""A rank's file of a checkpoint, byte by byte in host memory: filled by copies, written at once, hashed meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moefold.checkpoint.boxes import Box, elements
from moefold.checkpoint.ledger import DTYPES, PIECE, Shape, digest
from moefold.checkpoint.place import BLOCK, Place, write_file
from moefold.checkpoint.plan import Plan, pieces_in
from moefold.checkpoint.reader import chunk_name
from moefold.checkpoint.state import Part

HASHERS = min(4, os.cpu_count() or 1)  # threads: writing needs no core, and neither needs Python's lock
BESIDE = 10  # how far hashing stands back behind the training, in steps of `nice`

Digests = dict[tuple[str, int], bytes | None]  # of pieces, by tensor and first element


@dataclass(frozen=True)
class Placed:
    """A chunk and where it lies in the file, behind the header."""

    name: str
    box: Box
    what: Shape
    at: int

    @property
    def end(self) -> int:
        return self.at + elements(self.box) * self.what.itemsize


class Lying(NamedTuple):
    """A piece of a tensor, by its first element, and where its bytes lie."""

    name: str
    first: int
    at: int
    end: int


@dataclass(frozen=True)
class Written:
    """A file that was written: its size, the digest of its header, and of what pieces it holds whole."""

    file: str
    bytes: int
    sha256: str
    digests: Digests


class Image:
    """Host memory for what a rank writes, kept from save to save. Pinned, copies from a GPU run beside its work."""

    def __init__(self, plan: Plan, rank: int, pinned: bool):
        self.file, self.chunks, at = f"rank-{rank:05d}.safetensors", list[Placed](), 0
        for name, box in plan.of(rank):
            self.chunks.append(Placed(name, box, plan.shapes[name], at))
            at = self.chunks[-1].end
        self.header = header_of(self.chunks)
        self.whole = aligned_bytes(len(self.header) + at, pinned and at > 0)
        self.whole[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        self.bytes = self.whole[len(self.header) :]

    def fill(self, parts: dict[str, Part]) -> None:
        """Copy what is held now. On a GPU copies are begun, on the current stream, and waited for at the end."""
        for chunk in self.chunks:
            part = parts[chunk.name]
            held = next(held for held in part.held if held.box == chunk.box)
            place = self.bytes[chunk.at : chunk.end].view(part.dtype).view([size for _, size in chunk.box])
            place.copy_(held.read(), non_blocking=True)
        if self.bytes.is_pinned():
            torch.cuda.current_stream().synchronize()

    def write(self, folder: Place) -> Written | None:
        """Nothing, if another rank writes all that this one holds."""
        if not self.chunks:
            return None
        with ThreadPoolExecutor(HASHERS, initializer=stand_back) as pool:
            raw = self.bytes.numpy().data
            hashing = [pool.submit(hash_all, raw, pieces) for pieces in self.lots()]
            write_file(folder / self.file, self.whole.numpy().data)
            digests: Digests = {piece: found for each in hashing for piece, found in each.result().items()}
        return Written(self.file, len(self.whole), hashlib.sha256(self.header[8:]).hexdigest(), digests)

    def lots(self) -> Iterator[list[Lying]]:
        """The pieces that lie here whole, small ones many together: a thread should have some work at a time."""
        lot, size = list[Lying](), 0
        for chunk in self.chunks:
            for piece, begin in pieces_in(chunk.box, chunk.what):
                at = chunk.at + begin * chunk.what.itemsize
                end = at + (piece.last - piece.first) * chunk.what.itemsize
                lot.append(Lying(chunk.name, piece.first, at, end))
                size += end - at
                if size >= PIECE:
                    yield lot
                    lot, size = [], 0
        yield lot


def hash_all(raw: memoryview, pieces: Sequence[Lying]) -> Digests:
    return {(each.name, each.first): digest(raw[each.at : each.end]) for each in pieces}


def header_of(chunks: Sequence[Placed]) -> bytes:
    """The beginning of a safetensors file: the length of a description in JSON, and that."""
    entries = {
        chunk_name(c.name, c.box): {
            "dtype": DTYPES[c.what.dtype][0],
            "shape": [size for _, size in c.box],
            "data_offsets": [c.at, c.end],
        }
        for c in chunks
    }
    raw = json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)  # tensors begin at multiples of eight
    return struct.pack("<Q", len(raw)) + raw


def aligned_bytes(size: int, pinned: bool) -> torch.Tensor:
    """Memory that begins with a block, so that a disk can fetch it."""
    room = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)
    return room[-room.data_ptr() % BLOCK :][:size]


def stand_back() -> None:
    """This thread gives way to the training, where threads can do so by themselves; it is no more than a courtesy."""
    if sys.platform == "linux":
        with suppress(OSError):
            nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + BESIDE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
