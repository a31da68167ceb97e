"""The host image: a rank's file of a checkpoint, byte by byte in host memory. It is filled by copies from the device,
written as it is, and hashed meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moefold.checkpoint.format.boxes import Box, box_sizes, element_count
from moefold.checkpoint.format.ledger import (
    HASH_PIECE_BYTES,
    SAFETENSORS_DTYPES,
    PieceDigests,
    TensorSpec,
    sha256_digest,
)
from moefold.checkpoint.format.manifest import sha256_hex
from moefold.checkpoint.format.reader import chunk_name
from moefold.checkpoint.format.safetensors_header import LENGTH_BYTES, HeaderEntry, encode_safetensors_header
from moefold.checkpoint.format.storage import StoragePath, write_synced_file
from moefold.checkpoint.format.write_plan import RankPlan, pieces_inside_box
from moefold.checkpoint.live.logical_tensors import TensorPart
from moefold.layout.pinned_memory import host_bytes

HASH_THREADS = min(8, os.cpu_count() or 1)  # writing needs no core, and neither writing nor hashing holds the GIL
NICE_STEPS = 10  # by which hashing threads are below the training in priority


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk and its first byte in the file, counted behind the header."""

    name: str
    box: Box
    spec: TensorSpec
    begin: int

    @property
    def end(self) -> int:
        size = element_count(self.box) * self.spec.itemsize
        return self.begin + size


class PieceSpan(NamedTuple):
    """A piece of a tensor, by its first element, and the bytes of the image that it covers."""

    name: str
    first: int
    begin: int
    end: int


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors: its size, the digest of its header, and the digests of the pieces that it contains whole."""

    name: str
    bytes: int
    sha256: str
    digests: PieceDigests


class HostImage:
    """Host memory for the file of a rank, kept from save to save. With pinned memory, copies from a GPU overlap its
    computation."""

    def __init__(self, plan: RankPlan, rank: int, pinned: bool):
        self.file = rank_file_name(rank)
        self.chunks = place_chunks(plan)
        data_bytes = 0
        if self.chunks:
            data_bytes = self.chunks[-1].end
        self.header = encode_chunk_header(self.chunks)
        header = bytearray(self.header)
        data_begin = len(header)
        pinned = pinned and data_bytes > 0
        self.file_bytes = host_bytes(data_begin + data_bytes, pinned)
        header_bytes = torch.frombuffer(header, dtype=torch.uint8)
        self.file_bytes[:data_begin] = header_bytes
        self.data = self.file_bytes[data_begin:]

    def copy_parts(self, parts: dict[str, TensorPart]) -> None:
        """Copy the current values."""
        for chunk in self.chunks:
            self.copy_chunk(chunk, parts[chunk.name])
        if self.data.is_pinned():
            torch.cuda.current_stream().synchronize()

    def copy_chunk(self, chunk: PlacedChunk, part: TensorPart) -> None:
        """Copy the current values of a chunk; from a GPU the copy is queued on the current stream."""
        matching = [held for held in part.held if held.box == chunk.box]
        raw = self.data[chunk.begin : chunk.end]
        flat = raw.view(part.dtype)
        target = flat.view(box_sizes(chunk.box))
        target.copy_(matching[0].read(), non_blocking=True)

    def write_file(self, folder: StoragePath) -> WrittenFile | None:
        """Write the file and hash its pieces. None if other ranks write everything that this rank holds."""
        if not self.chunks:
            return None
        digests: PieceDigests = {}
        with ThreadPoolExecutor(HASH_THREADS, initializer=lower_priority) as pool:
            # Threads hash while this one writes.
            raw = self.data.numpy().data
            batches = self.hash_batches()
            hashing = [pool.submit(digest_pieces, raw, batch) for batch in batches]
            content = self.file_bytes.numpy().data
            write_synced_file(folder / self.file, content)
            for batch in hashing:
                digests |= batch.result()
        sha256 = sha256_hex(self.header[LENGTH_BYTES:])
        size = len(self.file_bytes)
        return WrittenFile(self.file, size, sha256, digests)

    def hash_batches(self) -> Iterator[list[PieceSpan]]:
        """The pieces that the image contains whole, small ones in batches: a thread gets a few MiB at a time."""
        batch: list[PieceSpan] = []
        size = 0
        for span in self.piece_spans():
            batch.append(span)
            size += span.end - span.begin
            if size >= HASH_PIECE_BYTES:
                yield batch
                batch = []
                size = 0
        yield batch

    def piece_spans(self) -> Iterator[PieceSpan]:
        for chunk in self.chunks:
            itemsize = chunk.spec.itemsize
            pieces = pieces_inside_box(chunk.box, chunk.spec)
            for piece, offset in pieces:
                begin = chunk.begin + offset * itemsize
                size = (piece.last - piece.first) * itemsize
                end = begin + size
                yield PieceSpan(chunk.name, piece.first, begin, end)


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def place_chunks(plan: RankPlan) -> list[PlacedChunk]:
    """The chunks of a rank one behind the other."""
    chunks: list[PlacedChunk] = []
    position = 0
    for name, box in plan.chunks:
        spec = plan.specs[name]
        chunk = PlacedChunk(name, box, spec, position)
        chunks.append(chunk)
        position = chunk.end
    return chunks


def digest_pieces(raw: memoryview, pieces: Sequence[PieceSpan]) -> PieceDigests:
    digests: PieceDigests = {}
    for piece in pieces:
        values = raw[piece.begin : piece.end]
        digests[piece.name, piece.first] = sha256_digest(values)
    return digests


def encode_chunk_header(chunks: Sequence[PlacedChunk]) -> bytes:
    entries: dict[str, object] = {}
    for chunk in chunks:
        code, _ = SAFETENSORS_DTYPES[chunk.spec.dtype]
        shape = tuple(box_sizes(chunk.box))
        entry = HeaderEntry(code, shape, chunk.begin, chunk.end)
        name = chunk_name(chunk.name, chunk.box)
        entries[name] = entry.as_json()
    return encode_safetensors_header(entries)


def lower_priority() -> None:
    """Lower this hashing thread's priority (Linux, best effort)."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        own = os.getpriority(os.PRIO_PROCESS, 0)
        lowered = min(19, own + NICE_STEPS)
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, lowered)
