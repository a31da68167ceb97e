"""Past keys: every position lies in its slot, and a layer with a window keeps the window alone."""

from __future__ import annotations

import torch

from moefold.layout.past_keys import PastKeys


def begun(most: int, *begins: int) -> PastKeys:
    return PastKeys(most, torch.tensor(begins))


def test_a_prompt_lies_in_the_slots_of_its_positions():
    every = torch.randn(2, 5, 3, 4)
    narrow = torch.randn(2, 5, 6)
    past = begun(8, 0, 0)
    past.keep_prompt(7, [every, narrow])
    for room, made in zip(past.rooms(7), (every, narrow), strict=True):
        assert room.shape[1] == 8
        assert torch.equal(room[:, :5], made)


def test_a_layer_with_a_window_keeps_the_window():
    every = torch.arange(1.0, 6)[None, :, None]
    for window, kept in ((1, [5]), (3, [4, 5, 3]), (4, [5, 2, 3, 4]), (20, [1, 2, 3, 4, 5, 0, 0])):
        past = begun(7, 0)
        past.keep_prompt(0, [every], window)
        (room,) = past.rooms(0)
        assert room[0, :, 0].tolist() == kept


def test_positions_are_counted_from_the_document():
    past = begun(9, 0, 4)
    begins = torch.tensor([[0, 0], [1, 1]])
    assert listed(past.positions(2, begins)) == [[0, 1], [-1, 0]]
    assert past.positions(6, None) == slice(6)
    past.advance(6)
    assert listed(past.positions(1, None)) == [[6], [2]]
    past.advance(1)
    assert listed(past.positions(1, None)) == [[7], [3]]


def test_what_layers_make_alike_is_made_once_in_a_pass():
    past = begun(9, 0)
    made = [past.once("angles", object) for _ in range(2)]
    assert made[0] is made[1]
    past.advance(1)
    assert past.once("angles", object) is not made[0]


def listed(numbers: object) -> list[list[int]]:
    assert isinstance(numbers, torch.Tensor)
    return numbers.tolist()
