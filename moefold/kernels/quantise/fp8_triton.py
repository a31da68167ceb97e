"""FP8 numbers in Triton (rule: fp8.py): the scale of a block, and rounding with a scale. Imported only where Triton is.

Each step is one fp32 instruction with IEEE rounding, as in the reference, so bytes and scales are the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from moefold.kernels.quantise import fp8

SMALLEST_SCALE = constexpr(fp8.SMALLEST_SCALE)
INFINITY_BITS = constexpr(0x7F800000)
MANTISSA = constexpr((1 << 23) - 1)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|: as integers they have the order of the magnitudes, and NaN is above infinity."""
    magnitude = tl.abs(x)
    return magnitude.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_of_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scales(at, inside):
    """Scales, 1 where there are none."""
    return tl.load(at, mask=inside, other=1.0)


@triton.jit
def scale_from_bits(bits, LARGEST: constexpr, POWER_OF_TWO: constexpr):
    """Scale of a block from the bits of its largest magnitude."""
    amax = magnitude_of_bits(bits)
    scale = tl.div_rn(amax, LARGEST)
    if POWER_OF_TWO:
        scale = next_power_of_two(scale)
    scale = tl.maximum(scale, SMALLEST_SCALE)
    scale = tl.where(bits == 0, 1.0, scale)
    is_finite = bits < INFINITY_BITS
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def next_power_of_two(x):
    """The smallest power of two that is not below x, for positive normal x."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + MANTISSA) & ~MANTISSA  # a mantissa other than zero carries into the exponent
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def round_to_fp8(x, scale, LARGEST: constexpr, FORMAT: constexpr):
    """Bytes of x; `scale` is broadcast. Values beyond the largest number of the format become that number."""
    factor = tl.div_rn(1.0, scale)
    scaled = x * factor
    clamped = tl.clamp(scaled, -LARGEST, LARGEST, tl.PropagateNan.ALL)
    is_number = clamped == clamped
    sound = tl.where(is_number, clamped, float("nan"))  # one NaN, whatever its sign was
    return sound.to(FORMAT)
