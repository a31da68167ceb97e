"""FP8 numbers in Gluon (rule: fp8.py): maxima that NaN wins, and the scale of a maximum. Imported only where Triton is.

The cast of fp32 to FP8 is one instruction that saturates, rounds ties to even, and makes one NaN of all.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

SMALLEST_SCALE = constexpr(2.0**-126)
NAN_WINS = constexpr(tl.PropagateNan.ALL)


@gluon.jit
def larger_magnitude(x, y):
    return gl.maximum(x, y, propagate_nan=NAN_WINS)


@gluon.jit
def divide(x, DIVISOR: constexpr):
    """x / DIVISOR, rounded as IEEE asks: the product with the reciprocal, corrected by its exact remainder. The
    instruction sequence of a general division has branches, which keep rows from being computed side by side."""
    factor: constexpr = 1.0 / DIVISOR
    quotient = x * factor
    remainder = gl.fma(quotient, -DIVISOR, x)
    return gl.fma(remainder, factor, quotient)


@gluon.jit
def reciprocal(x):
    """1 / x, rounded as IEEE asks, for normal x with a normal result: an estimate and one Newton step."""
    estimate = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)
    error = gl.fma(estimate, -x, 1.0)
    return gl.fma(error, estimate, estimate)


@gluon.jit
def scale_from_amax(amax, LARGEST: constexpr, POWER_OF_TWO: constexpr):
    scale = divide(amax, LARGEST)
    if POWER_OF_TWO:
        mantissa: constexpr = (1 << 23) - 1
        bits = scale.to(gl.int32, bitcast=True)
        carried = bits + mantissa
        rounded = carried & ~mantissa
        scale = rounded.to(gl.float32, bitcast=True)
    scale = gl.maximum(scale, SMALLEST_SCALE)
    is_zero = amax == 0.0
    scale = gl.where(is_zero, 1.0, scale)
    return gl.fma(amax, 0.0, scale)  # NaN if amax is not finite; a comparison takes predicates, which are few
