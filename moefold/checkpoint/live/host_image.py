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

from moefold.checkpoint.format.boxes import Box, element_count
from moefold.checkpoint.format.ledger import HASH_PIECE_BYTES, SAFETENSORS_DTYPES, TensorSpec, sha256_digest
from moefold.checkpoint.format.reader import chunk_name
from moefold.checkpoint.format.storage import DISK_BLOCK, StoragePath, write_synced_file
from moefold.checkpoint.format.write_plan import WritePlan, pieces_inside_box
from moefold.checkpoint.live.logical_tensors import TensorPart

HASH_THREADS = min(4, os.cpu_count() or 1)  # threads: writing needs no core, and neither needs Python's lock
NICE_STEPS = 10  # how far hashing stands back behind the training, in steps of `nice`

PieceDigests = dict[tuple[str, int], bytes | None]  # of pieces, by tensor and first element


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk and where it lies in the file, behind the header."""

    name: str
    box: Box
    what: TensorSpec
    at: int

    @property
    def end(self) -> int:
        return self.at + element_count(self.box) * self.what.itemsize


class PieceSpan(NamedTuple):
    """A piece of a tensor, by its first element, and where its bytes lie."""

    name: str
    first: int
    at: int
    end: int


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written: its size, the digest of its header, and of what pieces it holds whole."""

    file: str
    bytes: int
    sha256: str
    digests: PieceDigests


class HostImage:
    """Host memory for what a rank writes, kept from save to save. Pinned, copies from a GPU run beside its work."""

    def __init__(self, plan: WritePlan, rank: int, pinned: bool):
        self.file, self.chunks, at = f"rank-{rank:05d}.safetensors", list[PlacedChunk](), 0
        for name, box in plan.of(rank):
            self.chunks.append(PlacedChunk(name, box, plan.shapes[name], at))
            at = self.chunks[-1].end
        self.header = encode_header(self.chunks)
        self.whole = aligned_bytes(len(self.header) + at, pinned and at > 0)
        self.whole[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        self.bytes = self.whole[len(self.header) :]

    def fill(self, parts: dict[str, TensorPart]) -> None:
        """Copy what is held now. On a GPU copies are begun, on the current stream, and waited for at the end."""
        for chunk in self.chunks:
            part = parts[chunk.name]
            held = next(held for held in part.held if held.box == chunk.box)
            place = self.bytes[chunk.at : chunk.end].view(part.dtype).view([size for _, size in chunk.box])
            place.copy_(held.read(), non_blocking=True)
        if self.bytes.is_pinned():
            torch.cuda.current_stream().synchronize()

    def write(self, folder: StoragePath) -> WrittenFile | None:
        """Nothing, if another rank writes all that this one holds."""
        if not self.chunks:
            return None
        with ThreadPoolExecutor(HASH_THREADS, initializer=lower_priority) as pool:
            raw = self.bytes.numpy().data
            hashing = [pool.submit(digest_pieces, raw, pieces) for pieces in self.hash_batches()]
            write_synced_file(folder / self.file, self.whole.numpy().data)
            digests: PieceDigests = {piece: found for each in hashing for piece, found in each.result().items()}
        return WrittenFile(self.file, len(self.whole), hashlib.sha256(self.header[8:]).hexdigest(), digests)

    def hash_batches(self) -> Iterator[list[PieceSpan]]:
        """The pieces that lie here whole, small ones many together: a thread should have some work at a time."""
        lot, size = list[PieceSpan](), 0
        for chunk in self.chunks:
            for piece, begin in pieces_inside_box(chunk.box, chunk.what):
                at = chunk.at + begin * chunk.what.itemsize
                end = at + (piece.last - piece.first) * chunk.what.itemsize
                lot.append(PieceSpan(chunk.name, piece.first, at, end))
                size += end - at
                if size >= HASH_PIECE_BYTES:
                    yield lot
                    lot, size = [], 0
        yield lot


def digest_pieces(raw: memoryview, pieces: Sequence[PieceSpan]) -> PieceDigests:
    return {(each.name, each.first): sha256_digest(raw[each.at : each.end]) for each in pieces}


def encode_header(chunks: Sequence[PlacedChunk]) -> bytes:
    """The beginning of a safetensors file: the length of a description in JSON, and that."""
    entries = {
        chunk_name(c.name, c.box): {
            "dtype": SAFETENSORS_DTYPES[c.what.dtype][0],
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
    room = torch.empty(size + DISK_BLOCK, dtype=torch.uint8, pin_memory=pinned)
    return room[-room.data_ptr() % DISK_BLOCK :][:size]


def lower_priority() -> None:
    """This thread gives way to the training, where threads can do so by themselves; it is no more than a courtesy."""
    if sys.platform == "linux":
        with suppress(OSError):
            nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE_STEPS)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
