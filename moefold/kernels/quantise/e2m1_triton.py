"""E2M1 numbers in Triton (rule: nvfp4.py): rounding, and eight codes in a word. Imported only where Triton is.

fp32 numbers below 2^-125 have the codes of E2M1 as their highest bits: a magnitude times 2^-126 has its code from bit
22 on, and the part of a step behind it in the 22 bits below.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from moefold.kernels.quantise import nvfp4
from moefold.kernels.quantise.fp8_triton import magnitude_bits, magnitude_of_bits
from moefold.layout import counter_random

CODE_AT = constexpr(22)
CODE = constexpr(nvfp4.LARGEST_CODE << 22)  # as a mask
BELOW_EIGHT = constexpr((8 << 22) - 1)
LARGEST = constexpr(nvfp4.E2M1_LARGEST)
ONE_BITS = constexpr(0x3F800000)
EXPONENT = constexpr(0x7F800000)
SIGN_AT = constexpr(31)
SIGN_BIT = constexpr(25)
SIGN_CODE = constexpr(nvfp4.SIGN_CODE << 22)
SIGN = constexpr(-0x80000000)
FROM_SMALLEST = constexpr(2.0**126)
TO_SMALLEST = constexpr(2.0**-126)
HALF_STEPS = constexpr(1.5 * 2.0**22)  # at whose size fp32 numbers are half a unit apart
DITHER_SHIFT = constexpr(22 - nvfp4.RANDOM_BITS)
UPPER_SHIFT = constexpr(16 - (22 - nvfp4.RANDOM_BITS))
DITHER = constexpr(((1 << nvfp4.RANDOM_BITS) - 1) << (22 - nvfp4.RANDOM_BITS))  # as a mask
MIDDLE = constexpr(1 << (21 - nvfp4.RANDOM_BITS))  # half of the distance of two random numbers
FIRST_FACTOR = constexpr(counter_random.HASH_32[0])
SECOND_FACTOR = constexpr(counter_random.HASH_32[1])
THIRD_FACTOR = constexpr(counter_random.HASH_32[2])
GROUP = constexpr(counter_random.GROUP)
WORD = constexpr(8)  # codes


@triton.jit
def nearest_magnitude(x):
    """The nearest magnitude of E2M1, ties to the even code; of NaN 6 or NaN, whose bits from 22 on are those of 6."""
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    power = magnitude_of_bits(tl.maximum(magnitude_bits(magnitude) & EXPONENT, ONE_BITS))
    # a sum whose last digit is a step of E2M1: half of the power of two below the magnitude, at least one half
    large = power * HALF_STEPS
    return (magnitude + large) - large


@triton.jit
def dithered_code(x, dither):
    """The code of a magnitude from bit 22 on, up if `dither` carries into it; bits below are undefined. NaN has the
    code of 6."""
    small = tl.abs(x) * TO_SMALLEST
    bits = small.to(tl.uint32, bitcast=True) + dither
    return tl.minimum(bits, BELOW_EIGHT).to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of_code(code):
    return magnitude_of_bits(code & CODE) * FROM_SMALLEST


@triton.jit
def with_sign_of(magnitude, x):
    sign = x.to(tl.int32, bitcast=True) & SIGN
    return magnitude_of_bits(magnitude.to(tl.int32, bitcast=True) | sign)


@triton.jit
def e2m1_values(
    x,
    dither,
    RANDOM: constexpr,
):
    """x rounded to E2M1."""
    if RANDOM:
        magnitude = magnitude_of_code(dithered_code(x, dither))
    else:
        magnitude = nearest_magnitude(x)
    return with_sign_of(magnitude, x)


@triton.jit
def e2m1_codes(
    x,
    dither,
    RANDOM: constexpr,
):
    """Codes of 4 bits as uint32."""
    if RANDOM:
        code = dithered_code(x, dither)
    else:
        code = magnitude_bits(nearest_magnitude(x) * TO_SMALLEST)
    sign = (x.to(tl.int32, bitcast=True) >> (SIGN_AT - SIGN_BIT)) & SIGN_CODE
    four_bits = (code & CODE) | sign
    return four_bits.to(tl.uint32, bitcast=True) >> CODE_AT


@triton.jit
def packed_words(
    codes,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    """Eight neighbours in a uint32, the first in the lowest bits: as two in a byte."""
    shape: constexpr = (TILE_M, TILE_N // WORD, WORD)
    shift = 4 * tl.arange(0, WORD)
    shifted = tl.reshape(codes, shape) << shift[None, None, :]
    return tl.sum(shifted, 2)


@triton.jit
def unpacked_values(
    word,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    shape: constexpr = (TILE_M, TILE_N)
    shift = 4 * tl.arange(0, WORD)
    codes = tl.reshape(word[:, :, None] >> shift[None, None, :], shape)
    magnitude = magnitude_of_bits((codes << CODE_AT) & CODE) * FROM_SMALLEST
    sign = (codes << 28) & SIGN
    return magnitude_of_bits(magnitude.to(tl.int32, bitcast=True) | sign)


@triton.jit
def hash_words(row, group):
    """Two words of 32 bits of a row's number, int64, and a group of columns."""
    key = (row >> 32).to(tl.uint32)
    x = row.to(tl.uint32) + group.to(tl.uint32)
    x = (x ^ (x >> 16)) * FIRST_FACTOR
    x = (x ^ (x >> 15) ^ key) * SECOND_FACTOR
    first = x ^ (x >> 16)
    x = first * THIRD_FACTOR
    return first, x ^ (x >> 15)


@triton.jit
def dither_of_groups(
    row,
    group,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    """What is added behind codes, of tiles (TILE_M, TILE_N // 4) of groups: random bits in the middle of their
    neighbours."""
    first, second = hash_words(row, group)
    lower = tl.join(first << DITHER_SHIFT, second << DITHER_SHIFT)
    upper = tl.join(first >> UPPER_SHIFT, second >> UPPER_SHIFT)
    shape: constexpr = (TILE_M, TILE_N)
    dither = tl.reshape(tl.join(lower, upper), shape)
    return (dither & DITHER) | MIDDLE
