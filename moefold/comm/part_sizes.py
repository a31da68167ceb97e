"""Sizes of a rank's part of an arena: words for signals, rooms that exchanges use in turns, and rooms that are kept.
Torch-free, so that the planner counts them."""

from __future__ import annotations

ALIGNMENT = 256  # bytes
WORD_BYTES = 8
TURNS = 2


def aligned_bytes(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class PartSizes:
    """Bytes of a rank's part: words, and behind them the rooms of turns and those that are kept."""

    def __init__(self, words: int, room_bytes: int, kept: int = 0):
        self.word_bytes = words * WORD_BYTES
        self.first_room = aligned_bytes(self.word_bytes)
        self.room_bytes = aligned_bytes(room_bytes)
        self.rooms = TURNS + kept
        self.total = self.first_room + self.rooms * self.room_bytes

    def bytes_of_room(self, number: int, size: int, offset: int = 0) -> slice:
        """Where so many bytes of a room lie in a part."""
        end = offset + size
        assert end <= self.room_bytes, f"a room has {self.room_bytes} bytes, {end} are asked for"
        begin = self.first_room + number * self.room_bytes
        return slice(begin + offset, begin + end)
