"""Random numbers by counter (Philox 4x32 with 10 rounds): a number depends on its key and its counter alone, so ranks
that hold parts of a tensor draw the same numbers as one rank that holds all of it."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four numbers of 32 bits for each counter of four; all int64 tensors that broadcast against each other."""
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(ROUNDS):
        first_high, first_low = multiply_32(first, MULTIPLIERS[0])
        third_high, third_low = multiply_32(third, MULTIPLIERS[1])
        first = third_high ^ second ^ low_key
        second = third_low
        third = first_high ^ fourth ^ high_key
        fourth = first_low
        low_key = (low_key + KEY_STEPS[0]) & LOW_32
        high_key = (high_key + KEY_STEPS[1]) & LOW_32
    return first, second, third, fourth


def multiply_32(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two numbers of 32 bits, without the sign bit of int64."""
    low_half = (x & 0xFFFF) * factor
    high_half = (x >> 16) * factor + (low_half >> 16)
    low = ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)
    return high_half >> 16, low


def random_grid(key: tuple[int, int], rows: Tensor, columns: int, stream: int) -> Tensor:
    """A number of 32 bits, as int64, for each row number and column; `stream` tells tensors of one key apart. Four
    columns share a counter."""
    groups = -(-columns // 4)
    group = torch.arange(groups, device=rows.device)
    row = rows.long()[:, None]
    stream_number = torch.full_like(group, stream)
    numbers = philox(key, (row & LOW_32, row >> 32, group, stream_number))
    spread = [number.expand(len(rows), groups) for number in numbers]
    return torch.stack(spread, -1).flatten(1)[:, :columns]
