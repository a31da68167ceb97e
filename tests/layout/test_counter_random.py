"""Random numbers by counter."""

from __future__ import annotations

import pytest
import torch

from moefold.layout.counter_random import random_32, random_counters, uniform_noise

BITS = (1 << 64) - 1


def scrambled_by_hand(x: int) -> int:
    """On whole numbers without end, cut to 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def noise_by_hand(number: int, dim: int, layer: int) -> float:
    token = scrambled_by_hand((scrambled_by_hand(number) + layer + 1) & BITS)
    top = scrambled_by_hand((token + dim) & BITS) >> 40
    return (top - (1 << 24) if top >= 1 << 23 else top) / (1 << 23)


def test_noise_is_a_published_scrambling_of_row_stream_and_column():
    numbers = [0, 1, 2, 1000, 2**31, 2**40 + 5, 2**62]
    for layer in (0, 3):
        found = uniform_noise(torch.tensor(numbers), 5, layer).tolist()
        assert found == [[noise_by_hand(number, dim, layer) for dim in range(5)] for number in numbers]


def test_noise_is_even_within_its_bounds_and_independent_between_rows_columns_and_streams():
    one, other = uniform_noise(torch.arange(4000), 16, 0).double(), uniform_noise(torch.arange(4000), 16, 1).double()
    assert one.min() >= -1
    assert one.max() < 1
    spread = (one.numel() / 3) ** -0.5  # of a mean of so many numbers
    assert abs(one.mean().item()) < 4 * spread
    assert one.square().mean().item() == pytest.approx(1 / 3, abs=4 * spread)
    counts = torch.histc(one, 64, -1, 1)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    neighbours = {"tokens": (one[1:], one[:-1]), "dims": (one[:, 1:], one[:, :-1]), "layers": (one, other)}
    for between, (a, b) in neighbours.items():
        assert abs((a * b).mean().item()) < 4 * spread, between


def test_rows_and_columns_have_their_numbers_wherever_they_lie():
    whole = random_32(torch.arange(8), 4, torch.arange(10))
    part = random_32(torch.tensor([3, 0, 7]), 4, torch.arange(6, 10))
    assert torch.equal(part, whole[[3, 0, 7], 6:])
    assert not torch.equal(whole, random_32(torch.arange(8), 5, torch.arange(10)))


def test_numbers_are_even_and_of_32_bits():
    numbers = random_32(torch.arange(4096), 0, torch.arange(16))
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < 2**32
    counts = torch.bincount((numbers >> 28).flatten(), minlength=16)
    assert (counts / numbers.numel() - 1 / 16).abs().max() < 0.004


def test_numbers_of_16_bits_have_their_rows_and_columns_wherever_these_lie():
    whole = random_counters(torch.arange(8), 4, torch.arange(24)).numbers_of_16_bits()
    part = random_counters(torch.tensor([3, 0, 7]), 4, torch.tensor([8, 21, 3])).numbers_of_16_bits()
    assert torch.equal(part, whole[[3, 0, 7]][:, [8, 21, 3]])


def excess(cells: torch.Tensor, count: int) -> float:
    """Chi-square of counts that should be even, in standard deviations from its mean."""
    counts = torch.bincount(cells.flatten(), minlength=count).double()
    expected = cells.numel() / count
    chi_square = ((counts - expected).square() / expected).sum().item()
    return (chi_square - (count - 1)) / (2 * (count - 1)) ** 0.5


def test_numbers_of_16_bits_are_even_and_independent_of_their_neighbours():
    numbers = random_counters(torch.arange(2048), 7, torch.arange(2048)).numbers_of_16_bits()
    assert abs(excess(numbers, 2**16)) < 5
    high, low = numbers >> 10, numbers & 63
    for bits in (high, low):
        for distance in (1, 2, 3, 4, 5, 8, 16):
            for place in range(4):  # in its group
                columns = bits[:, place:-distance:4] * 64 + bits[:, place + distance :: 4]
                assert abs(excess(columns, 64**2)) < 5, (distance, place)
            rows = bits[:-distance] * 64 + bits[distance:]
            assert abs(excess(rows, 64**2)) < 5, distance
    eighth = numbers.view(2048, -1, 4) >> 13
    groups = eighth @ torch.tensor([512, 64, 8, 1])
    assert abs(excess(groups, 8**4)) < 5
    centred = (numbers.double() + 0.5) / 2**16 - 0.5
    for dim in (0, 1):  # sums have the spread of independent numbers
        spread = centred.sum(dim).square().mean().item()
        assert abs(spread / (2048 / 12) - 1) < 0.2
