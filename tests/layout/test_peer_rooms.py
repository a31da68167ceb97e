"""Rooms of all ranks: what is made for them is made once for each request, and in bounded number."""

from __future__ import annotations

import torch

from moefold.layout import peer_rooms
from moefold.layout.peer_rooms import PeerRooms, as_peer_rooms


def sizes_in(rooms: PeerRooms, width: int) -> list[int]:
    return [room.numel() // width for room in rooms]


def test_what_is_made_for_rooms_is_made_once_for_each_request():
    rooms = PeerRooms(torch.zeros(rows, 4) for rows in (2, 3))
    first = rooms.keep(sizes_in, 4)
    assert first == [2, 3]
    assert rooms.keep(sizes_in, 4) is first
    assert rooms.keep(sizes_in, 2) == [4, 6]
    assert as_peer_rooms(rooms) is rooms


def test_rooms_with_the_same_tensors_are_others():
    tensors = [torch.zeros(2, 2)]
    one, other = PeerRooms(tensors), as_peer_rooms(tensors)
    assert one != other
    assert len({one, other}) == 2


def test_requests_that_change_in_every_step_take_no_memory():
    rooms = PeerRooms([torch.zeros(2, 2)])
    stays = rooms.keep(sizes_in, 2)
    for width in range(1, 2 * peer_rooms.MOST_FOR_SIZES):
        rooms.keep_for_sizes(sizes_in, width)
    assert 0 < len(rooms.for_sizes) <= peer_rooms.MOST_FOR_SIZES
    assert rooms.keep(sizes_in, 2) is stays, "a graph may read it"
