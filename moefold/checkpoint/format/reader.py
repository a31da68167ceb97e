"""Reader of a checkpoint's tensors: any box, as bytes, and no more is read than the box needs. Torch-free.

    rank-00000.safetensors   chunks, each a box of a logical tensor, under the name "tensor@start,start"

The headers of these files are the only table of chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from moefold.checkpoint.format.boxes import (
    Box,
    box_corner,
    box_overlap,
    box_sizes,
    box_slices,
    element_count,
    flat_range_boxes,
    relative_box,
)
from moefold.checkpoint.format.ledger import SAFETENSORS_DTYPES, HashPiece, TensorSpecs
from moefold.checkpoint.format.manifest import DamagedCheckpoint, sha256_hex
from moefold.checkpoint.format.safetensors_header import read_raw_header, tensors_in_file
from moefold.checkpoint.format.storage import ByteSource, StoragePath, open_byte_source
from moefold.config.errors import UserError, printable_text

TORCH_NAMES = {code: name for name, (code, _) in SAFETENSORS_DTYPES.items()}

ByteArray = np.ndarray[Any, Any]  # of the sizes of a box, and the bytes of an element


@dataclass(frozen=True)
class StoredChunk:
    """A box of a logical tensor, and the offset of its first byte in a file."""

    box: Box
    file: str
    offset: int
    dtype: str


ChunkIndex = dict[str, list[StoredChunk]]


def chunk_name(name: str, box: Box) -> str:
    corner = box_corner(box)
    starts = ",".join(map(str, corner))
    return f"{name}@{starts}"


def read_chunk_index(folder: StoragePath, headers: Mapping[str, str]) -> tuple[ChunkIndex, list[str]]:
    """Every chunk of these files, by logical tensor, and the problems found.

    `headers` has the expected digest of each file's header. A header with another digest is a problem, and is read all
    the same, so that the report can say what changed."""
    index: ChunkIndex = {}
    problems: list[str] = []
    for file, sha256 in headers.items():
        try:
            raw = read_raw_header(folder / file)
            if sha256_hex(raw) != sha256:
                problems.append(f"the header of {file} does not match its digest: it changed after it was written")
            add_file_chunks(index, folder / file, raw)
        except UserError as refused:
            raise DamagedCheckpoint(*problems, str(refused)) from None
        except ValueError as error:
            raise DamagedCheckpoint(*problems, f"{file}: {printable_text(str(error))}") from None
    return index, problems


def add_file_chunks(index: ChunkIndex, file: StoragePath, raw_header: bytes) -> None:
    tensors = tensors_in_file(file, raw_header)
    for chunk, stored in tensors.items():
        name, box = parse_chunk_name(chunk, stored.shape)
        dtype = torch_dtype_name(stored.dtype)
        placed = StoredChunk(box, file.name, stored.offset, dtype)
        index.setdefault(name, []).append(placed)


def torch_dtype_name(code: str) -> str:
    if code not in TORCH_NAMES:
        raise ValueError(f"a tensor of dtype {code}, which is never written")
    return TORCH_NAMES[code]


def parse_chunk_name(chunk: str, sizes: Sequence[int]) -> tuple[str, Box]:
    """The logical tensor and the box of a chunk, from its name and shape."""
    name, separator, corner = chunk.rpartition("@")
    starts = corner.split(",") if corner else []
    legal = all(map(is_short_number, starts))
    is_complete = separator and len(starts) == len(sizes)
    if not is_complete or not legal:
        raise ValueError(f'"{chunk}" does not say which part of which tensor it is')
    corner_numbers = map(int, starts)
    box = zip(corner_numbers, sizes, strict=True)
    return name, tuple(box)


def is_short_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


class BoxReader:
    """Reads boxes of the tensors of a checkpoint."""

    def __init__(self, folder: StoragePath, index: ChunkIndex, specs: TensorSpecs):
        self.folder = folder
        self.index = index
        self.specs = specs
        self.sources: dict[str, ByteSource] = {}

    def fetch_box(self, name: str, box: Box) -> ByteArray:
        """The bytes of a box; a view of the file if one chunk has all of them."""
        itemsize = self.specs[name].itemsize
        shape = (*box_sizes(box), itemsize)
        values = np.zeros(shape, np.uint8)
        filled = 0
        for chunk in self.index.get(name, ()):
            shared = box_overlap(chunk.box, box)
            if shared is None:
                continue
            source_box = relative_box(shared, chunk.box)
            part = self.read_chunk_box(chunk, source_box, itemsize)
            if shared == box:
                return part  # without a copy
            target_box = relative_box(shared, box)
            values[box_slices(target_box)] = part
            filled += element_count(shared)
        count = element_count(box)
        if filled < count:
            raise DamagedCheckpoint(f'{count - filled} of {count} values of "{name}" are missing')
        return values

    def read_chunk_box(self, chunk: StoredChunk, box: Box, itemsize: int) -> ByteArray:
        """A box of a chunk. The rows of the outermost dim are read whole, then cut."""
        row_sizes = box_sizes(chunk.box)[1:]
        row_bytes = prod(row_sizes) * itemsize
        # A scalar has no dims: it is read as one row.
        first, rows = box[0] if box else (0, 1)
        begin = chunk.offset + first * row_bytes
        end = begin + rows * row_bytes
        source = self.byte_source(chunk.file)
        raw = source(begin, end)
        flat = np.frombuffer(raw, np.uint8)
        if not box:
            return flat
        values = flat.reshape(rows, *row_sizes, itemsize)
        inside_rows = box_slices(box[1:])
        return values[:, *inside_rows]

    def byte_source(self, file: str) -> ByteSource:
        if file not in self.sources:
            self.sources[file] = open_byte_source(self.folder / file)
        return self.sources[file]

    def piece_digest(self, name: str, piece: HashPiece) -> bytes | None:
        """The digest of a piece of a tensor; None if values of the piece are missing."""
        digest = hashlib.sha256()
        shape = self.specs[name].shape
        try:
            boxes = flat_range_boxes(piece.first, piece.last, shape)
            for _, box in boxes:
                values = self.fetch_box(name, box)
                digest.update(np.ascontiguousarray(values).data)
        except DamagedCheckpoint:
            return None
        return digest.digest()
