"""Random numbers by counter."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.quantise.counter_random import philox, random_grid

PUBLISHED = [  # of the generator's authors: counter, key, numbers
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_published_numbers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]):
    first, second, third, fourth = (torch.tensor([number]) for number in counter)
    found = philox(key, (first, second, third, fourth))
    assert tuple(int(number) for number in found) == expected


def test_a_row_has_its_numbers_wherever_it_lies():
    rows = torch.tensor([3, 0, 2**40, 7])
    whole = random_grid((1, 2), torch.arange(8), 10, stream=4)
    part = random_grid((1, 2), rows, 10, stream=4)
    assert torch.equal(part[[0, 1, 3]], whole[[3, 0, 7]])
    assert len(part.unique()) == part.numel()
    assert not torch.equal(whole, random_grid((1, 2), torch.arange(8), 10, stream=5))


def test_numbers_are_even_and_of_32_bits():
    numbers = random_grid((9, 9), torch.arange(4096), 16, stream=0)
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < 2**32
    counts = torch.bincount((numbers >> 28).flatten(), minlength=16)
    assert (counts / numbers.numel() - 1 / 16).abs().max() < 0.004
