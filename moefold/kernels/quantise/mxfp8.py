"""MXFP8: blocks of 32 values along the contraction, E4M3 bytes, a power of two as their scale (OCP Microscaling).

    amax   = largest magnitude of the block
    scale  = 2^e as one byte e + 127 (E8M0, no sign, no mantissa); 255 is NaN
    q      = x * 2^-e, clamped to the largest number, rounded to the nearest, ties to even

`"up"`: 2^e is the smallest power of two that is not below amax * (1 / 448), so that nothing saturates. `"down"`, as
OCP's text has it: e is the exponent of amax less that of 448, so that values above 448 * 2^e saturate. A block with a
value that is not finite has scale NaN and bytes NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moefold.config.precision_recipes import MX_BLOCK
from moefold.kernels.quantise.fp8 import (
    E4M3,
    SQUARE,
    Quantised,
    in_blocks,
    in_squares,
    largest_magnitude,
    scale_of_values,
)

BIAS = 127  # of an fp32 exponent and of E8M0 alike
NAN_SCALE = 255
LARGEST_EXPONENT = 8  # of E4M3's largest number, 448 = 1.75 * 2^8
MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
HALF_OF_SMALLEST_NORMAL = 1 << 22  # 2^-127 as the mantissa of a subnormal fp32 number

ScaleRounding = Literal["up", "down"]


def e8m0_scale(amax: Tensor, rounding: ScaleRounding) -> Tensor:
    """The scale's byte, uint8, from an fp32 amax."""
    find_exponent = exponent_above if rounding == "up" else exponent_below
    exponent = find_exponent(amax)
    return e8m0_byte(exponent, amax)


def e8m0_byte(exponent: Tensor, amax: Tensor) -> Tensor:
    """e + 127 as uint8; NaN where amax is not finite."""
    is_finite = amax.isfinite()
    byte = torch.where(is_finite, exponent, NAN_SCALE)
    return byte.to(torch.uint8)


def exponent_above(amax: Tensor) -> Tensor:
    """e + 127 for the smallest 2^e that is not below amax / 448; e is at least -127."""
    number = 1.0 / E4M3.largest
    reciprocal = amax.new_full((), number)
    scaled = amax * reciprocal
    bits = scaled.view(torch.int32)
    exponent = bits >> MANTISSA_BITS
    mantissa = bits & MANTISSA
    is_subnormal = exponent == 0
    of_power = torch.where(is_subnormal, HALF_OF_SMALLEST_NORMAL, 0)
    is_above = mantissa > of_power
    return exponent + is_above.int()


def exponent_below(amax: Tensor, of_largest: int = LARGEST_EXPONENT) -> Tensor:
    """e + 127 for the exponent of amax less that of the format's largest number; e is at least -127."""
    bits = amax.view(torch.int32)
    exponent = bits >> MANTISSA_BITS
    below = exponent - of_largest
    return below.clamp(min=0)


def power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) in fp32; NaN for 255."""
    exponent = byte.int()
    bits = exponent << MANTISSA_BITS
    is_subnormal = exponent == 0
    bits = torch.where(is_subnormal, HALF_OF_SMALLEST_NORMAL, bits)
    value = bits.view(torch.float32)
    is_nan = exponent == NAN_SCALE
    return torch.where(is_nan, torch.nan, value)


def inverse_power(byte: Tensor) -> Tensor:
    """2^(127 - byte) in fp32; NaN for 255."""
    is_nan = byte == NAN_SCALE
    inverse = 2 * BIAS - byte.int()
    inverse = torch.where(is_nan, NAN_SCALE, inverse)
    return power_of_two(inverse)


def quantise_mxfp8(x: Tensor, rounding: ScaleRounding = "up", block: int = MX_BLOCK) -> Quantised:
    """Blocks along the last dim, whose size is a multiple of a block. Scales: uint8, one for a block."""
    wide = x.float()
    blocks = in_blocks(wide, -1, block)
    amax = largest_magnitude(blocks, -1)
    scales = e8m0_scale(amax, rounding)
    values = round_blocks(blocks, scales[..., None])
    return Quantised(values.flatten(-2), scales)


def quantise_mxfp8_squares(w: Tensor, rounding: ScaleRounding = "up") -> Quantised:
    """Blocks of 32 x 32 in the last two dims: the transposed matrix has the transposed bytes and scales."""
    wide = w.float()
    blocks = in_squares(wide, MX_BLOCK)
    amax = largest_magnitude(blocks, SQUARE)
    scales = e8m0_scale(amax, rounding)
    of_squares = scales[..., :, None, :, None]
    values = round_blocks(blocks, of_squares)
    values = values.reshape(w.shape)
    return Quantised(values, scales)


def round_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    is_nan = scales == NAN_SCALE
    scaled = blocks * inverse_power(scales)
    largest = E4M3.largest
    clamped = scaled.clamp(-largest, largest)
    sound = torch.where(is_nan, torch.nan, clamped)
    return sound.to(E4M3.dtype)


def dequantise_mxfp8(quantised: Quantised, block: int = MX_BLOCK) -> Tensor:
    """fp32 values, exact. Scales of one row each, or of squares of a block."""
    values, scales = quantised
    factors = power_of_two(scales)
    return values.float() * scale_of_values(factors, values, block)
