"""FP8 numbers in Gluon (rule: fp8.py): maxima that NaN wins, and the scale of a maximum. Imported only where Triton is.

The cast of fp32 to FP8 is one instruction that saturates, rounds ties to even, and makes one NaN of all.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SMALLEST_SCALE = gl.constexpr(2.0**-126)
NAN_WINS = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def larger_magnitude(x, y):
    return gl.maximum(x, y, propagate_nan=NAN_WINS)


@gluon.jit
def scale_from_amax(amax, LARGEST: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    scale = gl.div_rn(amax, LARGEST)
    if POWER_OF_TWO:
        mantissa: gl.constexpr = (1 << 23) - 1
        bits = scale.to(gl.int32, bitcast=True)
        bits = (bits + mantissa) & ~mantissa
        scale = bits.to(gl.float32, bitcast=True)
    scale = gl.maximum(scale, SMALLEST_SCALE)
    scale = gl.where(amax == 0.0, 1.0, scale)
    return gl.where(amax < float("inf"), scale, float("nan"))
