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
from moefold.kernels.quantise.fp8 import E4M3, Quantised, largest_magnitude

BIAS = 127  # of an fp32 exponent and of E8M0 alike
NAN_SCALE = 255
LARGEST_EXPONENT = 8  # of E4M3's largest number, 448 = 1.75 * 2^8
MANTISSA_BITS = 23
MANTISSA = (1 << MANTISSA_BITS) - 1
HALF_OF_SMALLEST_NORMAL = 1 << 22  # 2^-127 as the mantissa of a subnormal fp32 number

ScaleRounding = Literal["up", "down"]


def e8m0_scale(amax: Tensor, rounding: ScaleRounding) -> Tensor:
    """The scale's byte, uint8, from an fp32 amax."""
    exponent = exponent_above(amax) if rounding == "up" else exponent_below(amax)
    byte = torch.where(amax.isfinite(), exponent, NAN_SCALE)
    return byte.to(torch.uint8)


def exponent_above(amax: Tensor) -> Tensor:
    """e + 127 for the smallest 2^e that is not below amax / 448; e is at least -127."""
    reciprocal = torch.tensor(1.0 / E4M3.largest, dtype=torch.float32, device=amax.device)
    bits = (amax * reciprocal).view(torch.int32)
    exponent = bits >> MANTISSA_BITS
    mantissa = bits & MANTISSA
    is_above = torch.where(exponent == 0, mantissa > HALF_OF_SMALLEST_NORMAL, mantissa > 0)
    return exponent + is_above.int()


def exponent_below(amax: Tensor) -> Tensor:
    exponent = amax.view(torch.int32) >> MANTISSA_BITS
    return (exponent - LARGEST_EXPONENT).clamp(min=0)


def power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) in fp32; NaN for 255."""
    exponent = byte.int()
    bits = exponent << MANTISSA_BITS
    bits = torch.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, bits)
    value = bits.view(torch.float32)
    return torch.where(exponent == NAN_SCALE, torch.nan, value)


def quantise_mxfp8(x: Tensor, rounding: ScaleRounding = "up") -> Quantised:
    """Blocks along the last dim, whose size is a multiple of 32. Scales: uint8, with that dim 32 times smaller."""
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
    scales = e8m0_scale(largest_magnitude(blocks, -1), rounding)
    values = round_blocks(blocks, scales[..., None])
    return Quantised(values.flatten(-2), scales)


def quantise_mxfp8_squares(w: Tensor, rounding: ScaleRounding = "up") -> Quantised:
    """Blocks of 32 x 32 in the last two dims: the transposed matrix has the transposed bytes and scales."""
    blocks = w.float().unflatten(-1, (-1, MX_BLOCK)).unflatten(-3, (-1, MX_BLOCK))  # (..., I, 32, J, 32)
    scales = e8m0_scale(largest_magnitude(blocks, (-3, -1)), rounding)
    values = round_blocks(blocks, scales[..., :, None, :, None])
    return Quantised(values.reshape(w.shape), scales)


def round_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    inverse = 2 * BIAS - scales.int()
    inverse = torch.where(scales == NAN_SCALE, NAN_SCALE, inverse)
    scaled = blocks * power_of_two(inverse)
    clamped = scaled.clamp(-E4M3.largest, E4M3.largest)
    sound = torch.where(scales == NAN_SCALE, torch.nan, clamped)
    return sound.to(E4M3.dtype)


def dequantise_mxfp8(quantised: Quantised) -> Tensor:
    """fp32 values, exact. Scales of one row each, or of squares of 32 rows."""
    values, scales = quantised
    factors = power_of_two(scales).repeat_interleave(MX_BLOCK, -1)
    if factors.shape[-2] != values.shape[-2]:
        factors = factors.repeat_interleave(MX_BLOCK, -2)
    return values.float() * factors
