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

from moefold.checkpoint.boxes import Box, boxes_of, elements, overlap, slices, within
from moefold.checkpoint.hf.folder import header_of, raw_header
from moefold.checkpoint.ledger import DTYPES, Piece, Shape
from moefold.checkpoint.manifest import Damaged
from moefold.checkpoint.place import Place, Window, open_window
from moefold.config.refused import Refused, printable

TORCH_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a logical tensor as it lies in a file, from byte `at` on."""

    box: Box
    file: str
    at: int
    dtype: str


Index = dict[str, list[Chunk]]


def chunk_name(name: str, box: Box) -> str:
    return f"{name}@{','.join(str(start) for start, _ in box)}"


def read_index(folder: Place, headers: Mapping[str, str]) -> tuple[Index, list[str]]:
    """Every chunk of these files, by logical tensor. `headers` are the digests that the files' headers should have;
    those that differ are told, and read all the same, so that it can be said what changed."""
    index: Index = {}
    changed: list[str] = []
    for file, sha256 in headers.items():
        try:
            raw = raw_header(folder / file)
            if hashlib.sha256(raw).hexdigest() != sha256:
                changed.append(f"the header of {file} does not match its digest: it changed after it was written")
            for name, stored in header_of(folder / file, raw).items():
                tensor, box = parse(name, stored.shape)
                index.setdefault(tensor, []).append(Chunk(box, file, stored.at, torch_name(stored.dtype)))
        except Refused as refused:
            raise Damaged(*changed, str(refused)) from None
        except ValueError as error:
            raise Damaged(*changed, f"{file}: {printable(str(error))}") from None
    return index, changed


def torch_name(code: str) -> str:
    if code not in TORCH_NAMES:
        raise ValueError(f"a tensor of dtype {code}, which is never written")
    return TORCH_NAMES[code]


def parse(chunk: str, sizes: Sequence[int]) -> tuple[str, Box]:
    """The logical tensor and the box that a chunk's name and shape say."""
    name, at, starts = chunk.rpartition("@")
    numbers = starts.split(",") if starts else []
    if not at or len(numbers) != len(sizes) or not all(n.isdecimal() and len(n) < 20 for n in numbers):
        raise ValueError(f'"{chunk}" does not say which part of which tensor it is')
    return name, tuple(zip(map(int, numbers), sizes, strict=True))


class Reader:
    """The tensors of a checkpoint, by box."""

    def __init__(self, folder: Place, index: Index, shapes: Mapping[str, Shape]):
        self.folder, self.index, self.shapes = folder, index, shapes
        self.windows: dict[str, Window] = {}

    def fetch(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """The bytes of a box: of its sizes, and the size of an element. Perhaps a view of the file."""
        itemsize = self.shapes[name].itemsize
        found = np.zeros((*(size for _, size in box), itemsize), np.uint8)
        filled = 0
        for chunk in self.index.get(name, ()):
            shared = overlap(chunk.box, box)
            if shared is None:
                continue
            values = self.part(chunk, within(shared, chunk.box), itemsize)
            if shared == box:
                return values
            found[slices(within(shared, box))] = values
            filled += elements(shared)
        if filled < elements(box):
            raise Damaged(f'{elements(box) - filled} of {elements(box)} values of "{name}" are missing')
        return found

    def part(self, chunk: Chunk, box: Box, itemsize: int) -> np.ndarray[Any, Any]:
        """A box of a chunk: its outermost rows are read, and cut."""
        sizes = [size for _, size in chunk.box]
        first, rows = box[0] if box else (0, 1)
        row = prod(sizes[1:]) * itemsize
        raw = self.window(chunk.file)(chunk.at + first * row, chunk.at + (first + rows) * row)
        values = np.frombuffer(raw, np.uint8).reshape(*([rows, *sizes[1:]] if box else []), itemsize)
        return values[(slice(None), *slices(box[1:]))]

    def window(self, file: str) -> Window:
        if file not in self.windows:
            self.windows[file] = open_window(self.folder / file)
        return self.windows[file]

    def digest(self, name: str, piece: Piece) -> bytes | None:
        """Of a piece of a tensor; None if values of it are missing."""
        found = hashlib.sha256()
        try:
            for _, box in boxes_of(piece.first, piece.last, self.shapes[name].shape):
                found.update(np.ascontiguousarray(self.fetch(name, box)).data)
        except Damaged:
            return None
        return found.digest()
