"""MXFP4: E2M1 values in blocks of 32 along the last dim, with a power of two as their scale (OCP Microscaling).

    scale  = 2^e as one byte e + 127 (E8M0); e is the exponent of the block's largest magnitude, less that of 6
    q      = E2M1(x * 2^-e), clamped to 6, rounded to nearest, ties to the even code

Two codes share a byte, the first in the low half. What a block of any such file stands for is quantised exactly.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.precision_recipes import MX_BLOCK
from moefold.kernels.quantise.fp8 import Quantised, in_blocks, largest_magnitude
from moefold.kernels.quantise.half_bytes import unpack_pairs
from moefold.kernels.quantise.mxfp8 import e8m0_byte, exponent_below, inverse_power, power_of_two
from moefold.kernels.quantise.nvfp4 import E2M1_MAGNITUDES, pack_e2m1, round_to_e2m1

E2M1_EXPONENT = 2  # of E2M1's largest number, 6 = 1.5 * 2^2
E2M1_NUMBERS = (*E2M1_MAGNITUDES, *(-number for number in E2M1_MAGNITUDES))  # by code


def quantise_mxfp4(x: Tensor) -> Quantised:
    """The size of the last dim is a multiple of 32. Scales: uint8, with that dim 32 times smaller."""
    wide = x.float()
    blocks = in_blocks(wide, -1, MX_BLOCK)
    amax = largest_magnitude(blocks, -1)
    exponent = exponent_below(amax, E2M1_EXPONENT)
    scales = e8m0_byte(exponent, amax)
    factor = inverse_power(scales)
    scaled = blocks * factor[..., None]
    codes = round_to_e2m1(scaled.flatten(-2))
    return Quantised(pack_e2m1(codes), scales)


def dequantise_mxfp4(quantised: Quantised) -> Tensor:
    """fp32 values, exact."""
    values = unpack_pairs(quantised.values, E2M1_NUMBERS, first_is_high=False)
    blocks = in_blocks(values, -1, MX_BLOCK)
    factor = power_of_two(quantised.scales)
    blocks *= factor[..., None]
    return values
