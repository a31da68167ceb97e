"""This rank's file of a checkpoint, laid out in host memory: filled by copies, written in one go, hashed meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from moefold.checkpoint.boxes import Box, elements
from moefold.checkpoint.ledger import DTYPES, Shape, digest
from moefold.checkpoint.place import Place, write_file
from moefold.checkpoint.plan import Plan, pieces_in
from moefold.checkpoint.reader import chunk_name
from moefold.checkpoint.state import Part

AT_ONCE = 16 << 20  # bytes of one write
HASHERS = max(1, min(4, (os.cpu_count() or 2) - 1))  # threads: a core is left to write; neither needs Python's lock

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
        self.bytes = torch.empty(at, dtype=torch.uint8, pin_memory=pinned and at > 0)

    def fill(self, parts: dict[str, Part]) -> None:
        """Copy what is held now. On a GPU copies are begun, on the current stream, and waited for at the end."""
        for chunk in self.chunks:
            part = parts[chunk.name]
            held = next(held for held in part.held if held.box == chunk.box)
            place = self.bytes[chunk.at : chunk.end].view(part.dtype).view([size for _, size in chunk.box])
            place.copy_(held.read(), non_blocking=True)
        if self.bytes.is_pinned():
            torch.cuda.current_stream().synchronize()

    def header(self) -> bytes:
        entries = {
            chunk_name(c.name, c.box): {
                "dtype": DTYPES[c.what.dtype][0],
                "shape": [size for _, size in c.box],
                "data_offsets": [c.at, c.end],
            }
            for c in self.chunks
        }
        raw = json.dumps(entries).encode()
        return raw + b" " * (-len(raw) % 8)  # tensors begin at multiples of eight

    def write(self, folder: Place) -> Written | None:
        """Nothing, if another rank writes all that this one holds."""
        if not self.chunks:
            return None
        header, raw = self.header(), self.bytes.numpy().data
        with ThreadPoolExecutor(HASHERS) as pool:
            hashing = dict(self.begin_hashing(pool, raw))
            beginning = struct.pack("<Q", len(header)) + header
            steps = (raw[at : at + AT_ONCE] for at in range(0, len(raw), AT_ONCE))
            write_file(folder / self.file, (beginning, *steps))
            digests: Digests = {piece: future.result() for piece, future in hashing.items()}
        return Written(self.file, len(beginning) + len(raw), hashlib.sha256(header).hexdigest(), digests)

    def begin_hashing(
        self, pool: ThreadPoolExecutor, raw: memoryview[Any]
    ) -> Iterator[tuple[tuple[str, int], Future[bytes]]]:
        for chunk in self.chunks:
            for piece, begin in pieces_in(chunk.box, chunk.what):
                at = chunk.at + begin * chunk.what.itemsize
                end = at + (piece.last - piece.first) * chunk.what.itemsize
                yield (chunk.name, piece.first), pool.submit(digest, raw[at:end])
