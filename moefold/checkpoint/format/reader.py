"""Boxes of the tensors in a checkpoint, as bytes: no more is read than is asked for. Torch-free.

    rank-00000.safetensors   chunks, each a box of a logical tensor, under "name@start,start"

The headers of these files are the only table of chunks there is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from moefold.checkpoint.format.boxes import Box, box_overlap, box_slices, element_count, flat_range_boxes, relative_box
from moefold.checkpoint.format.ledger import SAFETENSORS_DTYPES, HashPiece, TensorSpec
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.storage import ByteSource, StoragePath, open_byte_source
from moefold.checkpoint.hf.model_folder import read_raw_header, tensors_in_file
from moefold.config.errors import UserError, printable_text

TORCH_NAMES = {code: name for name, (code, _) in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class StoredChunk:
    """A box of a logical tensor as it lies in a file, from byte `at` on."""

    box: Box
    file: str
    at: int
    dtype: str


ChunkIndex = dict[str, list[StoredChunk]]


def chunk_name(name: str, box: Box) -> str:
    return f"{name}@{','.join(str(start) for start, _ in box)}"


def read_chunk_index(folder: StoragePath, headers: Mapping[str, str]) -> tuple[ChunkIndex, list[str]]:
    """Every chunk of these files, by logical tensor. `headers` are the digests that the files' headers should have;
    those that differ are told, and read all the same, so that it can be said what changed."""
    index: ChunkIndex = {}
    changed: list[str] = []
    for file, sha256 in headers.items():
        try:
            raw = read_raw_header(folder / file)
            if hashlib.sha256(raw).hexdigest() != sha256:
                changed.append(f"the header of {file} does not match its digest: it changed after it was written")
            for name, stored in tensors_in_file(folder / file, raw).items():
                tensor, box = parse_chunk_name(name, stored.shape)
                index.setdefault(tensor, []).append(StoredChunk(box, file, stored.at, torch_dtype_name(stored.dtype)))
        except UserError as refused:
            raise DamagedCheckpoint(*changed, str(refused)) from None
        except ValueError as error:
            raise DamagedCheckpoint(*changed, f"{file}: {printable_text(str(error))}") from None
    return index, changed


def torch_dtype_name(code: str) -> str:
    if code not in TORCH_NAMES:
        raise ValueError(f"a tensor of dtype {code}, which is never written")
    return TORCH_NAMES[code]


def parse_chunk_name(chunk: str, sizes: Sequence[int]) -> tuple[str, Box]:
    """The logical tensor and the box that a chunk's name and shape say."""
    name, at, starts = chunk.rpartition("@")
    numbers = starts.split(",") if starts else []
    if not at or len(numbers) != len(sizes) or not all(n.isdecimal() and len(n) < 20 for n in numbers):
        raise ValueError(f'"{chunk}" does not say which part of which tensor it is')
    return name, tuple(zip(map(int, numbers), sizes, strict=True))


class BoxReader:
    """The tensors of a checkpoint, by box."""

    def __init__(self, folder: StoragePath, index: ChunkIndex, shapes: Mapping[str, TensorSpec]):
        self.folder, self.index, self.shapes = folder, index, shapes
        self.windows: dict[str, ByteSource] = {}

    def fetch_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """The bytes of a box: of its sizes, and the size of an element. Perhaps a view of the file."""
        itemsize = self.shapes[name].itemsize
        found = np.zeros((*(size for _, size in box), itemsize), np.uint8)
        filled = 0
        for chunk in self.index.get(name, ()):
            shared = box_overlap(chunk.box, box)
            if shared is None:
                continue
            values = self.part(chunk, relative_box(shared, chunk.box), itemsize)
            if shared == box:
                return values
            found[box_slices(relative_box(shared, box))] = values
            filled += element_count(shared)
        if filled < element_count(box):
            raise DamagedCheckpoint(
                f'{element_count(box) - filled} of {element_count(box)} values of "{name}" are missing'
            )
        return found

    def part(self, chunk: StoredChunk, box: Box, itemsize: int) -> np.ndarray[Any, Any]:
        """A box of a chunk: its outermost rows are read, and cut."""
        sizes = [size for _, size in chunk.box]
        first, rows = box[0] if box else (0, 1)
        row = prod(sizes[1:]) * itemsize
        raw = self.window(chunk.file)(chunk.at + first * row, chunk.at + (first + rows) * row)
        values = np.frombuffer(raw, np.uint8).reshape(*([rows, *sizes[1:]] if box else []), itemsize)
        return values[(slice(None), *box_slices(box[1:]))]

    def window(self, file: str) -> ByteSource:
        if file not in self.windows:
            self.windows[file] = open_byte_source(self.folder / file)
        return self.windows[file]

    def digest(self, name: str, piece: HashPiece) -> bytes | None:
        """Of a piece of a tensor; None if values of it are missing."""
        found = hashlib.sha256()
        try:
            for _, box in flat_range_boxes(piece.first, piece.last, self.shapes[name].shape):
                found.update(np.ascontiguousarray(self.fetch_box(name, box)).data)
        except DamagedCheckpoint:
            return None
        return found.digest()
