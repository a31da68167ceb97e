"""FP8 numbers: formats, the scale of a block, rounding of values with a scale.

A block of values x with one fp32 scale s is stored as bytes q, and x is about q * s:

    amax  = largest magnitude of the block
    s     = amax / largest number of the format, at least 2^-126; rounded up to a power of two on request
    q     = x * (1 / s), clamped to the largest number, rounded to the nearest, ties to even

Each operation is one fp32 operation with IEEE rounding, so every implementation gives the same bytes and scales. A
block of zeros has scale 1. A block with a value that is not finite has scale NaN and bytes NaN: the loss will show it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # values that share a scale along the contraction
SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite too


class Fp8Format(NamedTuple):
    """`largest`: its largest number. Values above `saturates` are nearer to the number that would come next."""

    name: str
    dtype: torch.dtype
    largest: float
    saturates: float


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 464.0)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 61440.0)


class ScaleRule(NamedTuple):
    """The format of a tensor's bytes and the rule of its scales."""

    format: Fp8Format = E4M3
    power_of_two: bool = False


class Quantised(NamedTuple):
    """Bytes and the scales of their blocks. `scales` has as many dims as `values`."""

    values: Tensor
    scales: Tensor


def largest_magnitude(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """amax in fp32, NaN if any value is NaN."""
    return x.float().abs().amax(dim)


def scale_from_amax(amax: Tensor, rule: ScaleRule) -> Tensor:
    largest = torch.full_like(amax, rule.format.largest)
    scale = amax / largest  # on a GPU, torch would multiply by the reciprocal of a plain number
    if rule.power_of_two:
        scale = next_power_of_two(scale)
    scale = scale.clamp(min=SMALLEST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x, for positive normal x."""
    bits = x.view(torch.int32)
    mantissa = (1 << 23) - 1
    rounded = (bits + mantissa) & ~mantissa  # a mantissa other than zero carries into the exponent
    return rounded.view(torch.float32)


def round_to_fp8(x: Tensor, scale: Tensor, format: Fp8Format) -> Tensor:
    """Bytes of x; `scale` is broadcast. Values beyond the largest number of the format become that number."""
    scaled = x.float() * (1.0 / scale.float())
    clamped = scaled.clamp(-format.largest, format.largest)
    sound = torch.where(clamped.isnan(), torch.nan, clamped)  # one NaN, whatever its sign was
    return sound.to(format.dtype)
