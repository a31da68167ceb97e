"""FP8 in plain Python, from the definition of the formats: the value of every byte, the byte nearest to a number, and
the scale of a block. Shares no code with moefold/kernels/quantise."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
SIGN, NAN_BYTE = 0x80, 0x7F


def rounded_to_fp32(x: float) -> float:
    """Nearest fp32, ties to even. A result of one fp64 operation on fp32 numbers is rounded as if once."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def value_of_byte(byte: int, name: str) -> float:
    bits = MANTISSA_BITS[name]
    sign = -1.0 if byte & SIGN else 1.0
    exponent, mantissa = divmod(byte & ~SIGN, 1 << bits)
    bias = (1 << (6 - bits)) - 1
    if name == "e4m3" and byte & ~SIGN == 0x7F:
        return math.nan  # the only one: E4M3 has no infinity
    if name == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - bits)
    return sign * math.ldexp((1 << bits) + mantissa, exponent - bias - bits)


FINITE = {  # magnitudes in order; the place of each is its byte
    name: [value for byte in range(SIGN) if math.isfinite(value := value_of_byte(byte, name))] for name in MANTISSA_BITS
}


def nearest_byte(x: float, name: str) -> int:
    """Ties go to the even byte, whose mantissa is even. Beyond the largest number lies the largest number."""
    if math.isnan(x):
        return NAN_BYTE
    magnitudes = FINITE[name]
    above = min(bisect_left(magnitudes, abs(x)), len(magnitudes) - 1)
    candidates = (max(above - 1, 0), above)
    nearest = min(candidates, key=lambda byte: (abs(min(abs(x), magnitudes[-1]) - magnitudes[byte]), byte % 2))
    return nearest | (SIGN if math.copysign(1.0, x) < 0 else 0)


def scale_of_block(values: Sequence[float], name: str, power_of_two: bool = False) -> float:
    if not all(math.isfinite(x) for x in values):
        return math.nan
    amax = max((abs(x) for x in values), default=0.0)
    if amax == 0:
        return 1.0
    scale = rounded_to_fp32(amax / FINITE[name][-1])
    if power_of_two and scale:
        fraction, exponent = math.frexp(scale)
        scale = math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)
    return max(scale, 2.0**-126)


def bytes_of_block(values: Sequence[float], scale: float, name: str) -> list[int]:
    inverse = rounded_to_fp32(1.0 / scale)
    return [nearest_byte(rounded_to_fp32(x * inverse), name) for x in values]
