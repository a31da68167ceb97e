"""Values of four bits, two a byte, by a table of 16 numbers. Both values of a byte are looked up at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

LOW = 15  # the lower four bits


@cache
def pair_table(numbers: Sequence[float], first_is_high: bool, device: torch.device) -> Tensor:
    """(256, 2), fp32: both values of every byte, uploaded once."""
    table = torch.tensor(numbers, dtype=torch.float32)
    byte = torch.arange(256)
    low = table[byte & LOW]
    high = table[byte >> 4]
    pairs = (high, low) if first_is_high else (low, high)
    return torch.stack(pairs, -1).to(device)


def unpack_pairs(packed: Tensor, numbers: Sequence[float], first_is_high: bool) -> Tensor:
    """fp32 values; the last dim is twice as long."""
    table = pair_table(numbers, first_is_high, packed.device)
    pairs = table[packed.int()]
    return pairs.flatten(-2)
