"""Past keys: a layer gets everything that its queries may see, and keeps no more than that."""

from __future__ import annotations

import torch

from moefold.layout.past_keys import PastKeys

LENGTHS = [5, 1, 1, 3, 1]  # positions of each pass


def test_a_layer_gets_all_positions_in_order():
    every = torch.randn(2, sum(LENGTHS), 3, 4)
    narrow = torch.randn(2, sum(LENGTHS), 6)
    past = PastKeys(most=sum(LENGTHS))
    for count in LENGTHS:
        end = past.length + count
        here = slice(past.length, end)
        keys, latents = past.extend(7, [every[:, here], narrow[:, here]])
        assert torch.equal(keys, every[:, :end])
        assert torch.equal(latents, narrow[:, :end])
        past.advance(count)


def test_a_layer_with_a_window_keeps_what_the_next_query_may_see():
    every = torch.randn(2, sum(LENGTHS), 4)
    for window in (1, 3, 20):
        past = PastKeys(most=sum(LENGTHS))
        for count in LENGTHS:
            end = past.length + count
            (keys,) = past.extend(0, [every[:, past.length : end]], window)
            needed = min(end, count + window - 1)  # of all queries of this pass
            assert torch.equal(keys, every[:, end - needed : end])
            (kept,) = past.by_layer[0]
            assert kept.shape[1] == min(end, window - 1)
            past.advance(count)


def test_positions_and_begins_are_counted_from_the_document():
    past = PastKeys(most=9)
    past.advance(6)
    begins = torch.tensor([[0, 0], [4, 4]])
    assert listed(past.positions(2, begins)) == [[6, 7], [2, 3]]
    assert past.positions(2, None) == slice(6, 8)
    assert listed(past.begins_among(8, begins)) == [[0, 0], [4, 4]]
    assert listed(past.begins_among(3, begins)) == [[0, 0], [0, 0]]  # positions 5, 6, 7
    assert listed(past.begins_among(6, begins)) == [[0, 0], [2, 2]]
    assert past.begins_among(8, None) is None


def listed(numbers: object) -> list[list[int]]:
    assert isinstance(numbers, torch.Tensor)
    return numbers.tolist()
