"""The host window: host memory through which a rank's file of a checkpoint goes from the device to its storage.

    file      | header, chunks ...                                     |  in cuts of the same size
    window    | room 0 | room 1 | room 2 | room 3 |                       cut 4 takes room 0 again, once 0 is written

A window that has room for all cuts is an image of the file: then nothing on the device waits for the storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.checkpoint.format.storage import DISK_BLOCK
from moefold.checkpoint.live.copy_lanes import CopyLanes
from moefold.checkpoint.live.logical_tensors import TensorPart
from moefold.checkpoint.live.rank_file import PlacedChunk, RankFile, spans_inside
from moefold.layout.pinned_memory import host_bytes

Parts = dict[str, TensorPart]

LARGEST_CUT = 64 << 20  # bytes
CUTS_OF_WINDOW = 4  # at least, where the window is not too small: one is written while others are filled
FEWEST_ROOMS = 2
READ_BYTES = 16 << 20  # of a tensor that are read at once: moments in blocks are decoded before they are copied


class FileCut(NamedTuple):
    """Bytes begin..end of the file."""

    begin: int
    end: int


class HostWindow:
    """Host memory of at most `most` bytes (None: as many as the file has), but of two disk blocks at least, for a
    rank's file, kept from save to save. With pinned memory, copies from a GPU overlap its computation. `holds_file`:
    nothing on the device waits for the storage."""

    def __init__(self, file: RankFile, most: int | None, pinned: bool):
        self.file = file
        most = file.size if most is None else most
        self.cut_bytes = cut_size(most)
        starts = range(0, file.size, self.cut_bytes)
        self.cuts = [FileCut(begin, min(begin + self.cut_bytes, file.size)) for begin in starts]
        self.rooms = max(FEWEST_ROOMS, most // self.cut_bytes)
        size = self.rooms * self.cut_bytes
        self.holds_file = most >= file.size or size >= file.size
        if self.holds_file:
            self.rooms = len(self.cuts)
            size = file.size
        self.memory = host_bytes(size, pinned and size > 0)

    def room(self, number: int) -> Tensor:
        """The bytes of a cut, where they lie in the window."""
        begin, end = self.cuts[number]
        place = number % self.rooms * self.cut_bytes
        return self.memory[place : place + end - begin]

    def fill(self, number: int, parts: Parts, lanes: CopyLanes) -> None:
        """Copy the current values of a cut into its room."""
        begin, end = self.cuts[number]
        room = self.room(number)
        header = bytearray(self.file.header[begin:end])
        if header:
            room[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        for chunk, first, last in spans_inside(self.file.chunks, begin, end):
            part = parts[chunk.name]
            target = room[first - begin : last - begin]
            copy_values(part, chunk, first - chunk.begin, target, lanes)
        lanes.synchronize()


def cut_size(window_bytes: int) -> int:
    """Bytes of the cuts of a file: whole disk blocks, as direct I/O needs them."""
    size = min(LARGEST_CUT, window_bytes // CUTS_OF_WINDOW)
    return max(DISK_BLOCK, size - size % DISK_BLOCK)


def copy_values(part: TensorPart, chunk: PlacedChunk, first_byte: int, target: Tensor, lanes: CopyLanes) -> None:
    """Copy the current values of a chunk from that byte on, as many as the target has room for."""
    (held,) = [held for held in part.held if held.box == chunk.box]
    itemsize = chunk.spec.itemsize
    for offset in range(0, len(target), READ_BYTES):
        raw = target[offset : offset + READ_BYTES]
        place = raw.view(part.dtype)
        first = (first_byte + offset) // itemsize
        with lanes.next_lane():
            values = held.read_range(first, first + len(place))
            place.copy_(values, non_blocking=True)
