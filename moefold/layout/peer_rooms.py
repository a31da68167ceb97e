"""Rooms of all ranks in memory that they share, and what is made for them once because they stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
MOST_KEPT = 256  # things of some rooms: sizes that change in every step take no memory


class PeerRooms(list[Tensor]):
    """A room of each rank, the same as others only if it is the same object. `kept`: what was made for them."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, rooms: Iterable[Tensor]):
        super().__init__(rooms)
        self.kept: dict[Hashable, Any] = {}

    def keep(self, make: Callable[..., T], *given: Hashable) -> T:
        """`make(self, *given)`, made once."""
        key = (make, *given)
        found = self.kept.get(key)
        if found is None:
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            found = make(self, *given)
            self.kept[key] = found
        return found


def as_peer_rooms(rooms: list[Tensor]) -> PeerRooms:
    return rooms if isinstance(rooms, PeerRooms) else PeerRooms(rooms)
