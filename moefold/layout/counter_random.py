"""Random numbers by counter (splitmix64): a number depends on its row's number in the run, on its column and on the
stream that it is drawn from, and on nothing else. So it is the same on any layout, in any microbatch, and when a
forward is computed again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TWO_TO_64 = 1 << 64
LOW_32 = (1 << 32) - 1
LOW_16 = (1 << 16) - 1


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


HASH_32 = (0x7FEB352D, 0x846CA68B, 0x9E3779B1)  # factors: two of lowbias32, one for a second word
GROUP = 4  # columns, from a multiple of 4 on, that share a hash


class RandomCounters(NamedTuple):
    """Random numbers that a kernel may draw where it needs them: those of row r and column c are hashes of
    `row_R`[r] and `column_C`[c]."""

    row_R: Tensor
    column_C: Tensor

    def bits(self) -> Tensor:
        """64 bits for each row and column, (R, C) int64."""
        place_RC = self.row_R[:, None] + self.column_C
        return splitmix64_hash(place_RC)

    def numbers_of_32_bits(self) -> Tensor:
        """(R, C) int64."""
        return (self.bits() >> 32) & LOW_32

    def numbers_of_16_bits(self) -> Tensor:
        """(R, C) int64. Four columns share two words of 32 bits in 32-bit arithmetic, for kernels that draw a number
        for every value: the words of one group are a few instructions, where 64 bits for each value are thirty."""
        group_C = self.column_C // GROUP
        place_C = self.column_C % GROUP
        low_R1, high_R1 = halves_of_64_bits(self.row_R[:, None])
        first_RC = first_word(low_R1 + group_C, high_R1)
        second_RC = second_word(first_RC)
        word_RC = torch.where(place_C < 2, first_RC, second_RC)
        is_upper_C = place_C % 2
        return (word_RC >> 16 * is_upper_C) & LOW_16


def halves_of_64_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    return x & LOW_32, (x >> 32) & LOW_32


def first_word(counter: Tensor, key: Tensor) -> Tensor:
    """lowbias32 of the lower 32 bits of a counter, with a key in its middle."""
    x = counter & LOW_32
    x = ((x ^ (x >> 16)) * HASH_32[0]) & LOW_32
    x = x ^ (x >> 15) ^ key
    x = (x * HASH_32[1]) & LOW_32
    return x ^ (x >> 16)


def second_word(first: Tensor) -> Tensor:
    """A word whose halves are independent of either half of the first."""
    x = (first * HASH_32[2]) & LOW_32
    return x ^ (x >> 15)


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
