"""Rooms of all ranks in memory that they share, and what is made for them once because they stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
MOST_FOR_SIZES = 256  # that are kept: sizes that change in every step take no memory


class PeerRooms(list[Tensor]):
    """A room of each rank, the same as others only if it is the same object. `kept`: what was made for them, which
    graphs may read; `for_sizes`: likewise for sizes of a step."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __init__(self, rooms: Iterable[Tensor]):
        super().__init__(rooms)
        self.kept: dict[Hashable, Any] = {}
        self.for_sizes: dict[Hashable, Any] = {}

    def keep(self, make: Callable[..., T], *given: Hashable) -> T:
        """`make(self, *given)`, made once."""
        return self.find_or_make(self.kept, make, given)

    def keep_for_sizes(self, make: Callable[..., T], *sizes: Hashable) -> T:
        """The same for a bounded number of sizes."""
        if len(self.for_sizes) >= MOST_FOR_SIZES:
            self.for_sizes.clear()
        return self.find_or_make(self.for_sizes, make, sizes)

    def find_or_make(self, kept: dict[Hashable, Any], make: Callable[..., T], given: tuple[Hashable, ...]) -> T:
        key = (make, *given)
        found = kept.get(key)
        if found is None:
            found = make(self, *given)
            kept[key] = found
        return found


def as_peer_rooms(rooms: list[Tensor]) -> PeerRooms:
    return rooms if isinstance(rooms, PeerRooms) else PeerRooms(rooms)
