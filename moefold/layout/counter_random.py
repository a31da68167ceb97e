"""Random numbers by counter (splitmix64): a number depends on its row's number in the run, on its column and on the
stream that it is drawn from, and on nothing else. So it is the same on any layout, in any microbatch, and when a
forward is computed again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TWO_TO_64 = 1 << 64
LOW_32 = (1 << 32) - 1


def as_signed_int64(x: int) -> int:
    """The same 64 bits as a signed number: torch has no unsigned arithmetic."""
    has_sign_bit = x >= TWO_TO_64 >> 1
    return x - TWO_TO_64 if has_sign_bit else x


HASH_ROUNDS = (  # shift and factor
    (30, as_signed_int64(0xBF58476D1CE4E5B9)),
    (27, as_signed_int64(0x94D049BB133111EB)),
    (31, 1),
)


def splitmix64_hash(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, element by element."""
    for shift, factor in HASH_ROUNDS:
        kept_bits = 64 - shift
        low_bits = (1 << kept_bits) - 1  # masks the sign bits that torch's shift brings in
        shifted = (x >> shift) & low_bits
        x = (x ^ shifted) * factor
    return x


class RandomCounters(NamedTuple):
    """Random numbers that a kernel may draw where it needs them: that of row r and column c is the hash of
    `row_R`[r] + `column_C`[c]."""

    row_R: Tensor
    column_C: Tensor

    def bits(self) -> Tensor:
        """64 bits for each row and column, (R, C) int64."""
        place_RC = self.row_R[:, None] + self.column_C
        return splitmix64_hash(place_RC)

    def numbers_of_32_bits(self) -> Tensor:
        """(R, C) int64."""
        return (self.bits() >> 32) & LOW_32


def random_counters(number_R: Tensor, stream: int, column_C: Tensor) -> RandomCounters:
    hashed_R = splitmix64_hash(number_R)
    row_R = splitmix64_hash(hashed_R + stream + 1)
    return RandomCounters(row_R, column_C)


def uniform_noise(number_R: Tensor, columns: int, stream: int) -> Tensor:
    """(R, columns), fp32, uniform in [-1, 1)."""
    column_C = torch.arange(columns, device=number_R.device)
    bits_RC = random_counters(number_R, stream, column_C).bits()
    high_RC = bits_RC >> 40
    return high_RC.to(torch.float32) / (1 << 23)


def random_32(number_R: Tensor, stream: int, column_C: Tensor) -> Tensor:
    """Numbers of 32 bits as int64, (R, C)."""
    return random_counters(number_R, stream, column_C).numbers_of_32_bits()
