"""Split fp32: the nearest bf16 of an fp32 number, and the 16 bits that it lacks.

    fp32 as an integer  =  bf16 as an integer x 65536  +  a signed 16-bit number

Nearest, and of two equally near the one further from zero: then exactly 65536 fp32 numbers belong to every bf16 and the
pair is the fp32 number, bit for bit. (With torch's own rule, ties to even, 65537 belong to every second bf16.) A
model's bf16 weights are rounded by this rule from fp32 main weights, whether these are stored whole or split, and so
are moments that are kept as bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; fp32 to bf16 follows the rule above."""
    if (x.dtype, dtype) == (torch.float32, torch.bfloat16):
        return upper_bfloat16(x)
    return x.to(dtype)


def upper_bfloat16(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    rounded = bits + 0x8000
    upper = rounded >> 16
    upper_16 = upper.to(torch.int16)
    return upper_16.view(torch.bfloat16)


def lower_16_bits(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return bits.to(torch.int16)


def joined_fp32(upper: Tensor, lower: Tensor) -> Tensor:
    rounded = upper.to(torch.bfloat16)
    upper_16 = rounded.view(torch.int16)
    upper_32 = upper_16.to(torch.int32)
    bits = (upper_32 << 16) + lower
    return bits.view(torch.float32)
