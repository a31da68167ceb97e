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
import torch.nn.functional as F
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


Copies = tuple[Quantised | None, Quantised | None]  # along rows and along columns, those that were wanted
Layouts = tuple[Tensor, Tensor]  # of weights: (E, N, D) and (E, D, N)
Dims = int | tuple[int, ...]
SQUARE: Dims = (-3, -1)  # the dims of a square's values, as `in_squares` has them


def blocks_for(size: int, block: int = BLOCK) -> int:
    """The number of blocks that hold so many values; the last block may be cut short."""
    return -(-size // block)


def in_blocks(x: Tensor, dim: int, block: int = BLOCK) -> Tensor:
    """One dim as two: blocks, and the values of a block."""
    return x.unflatten(dim, (-1, block))


def in_whole_blocks(x: Tensor, dim: int, block: int = BLOCK) -> Tensor:
    """The same with zeros behind the last value, where the last block is not full."""
    missing = -x.shape[dim] % block
    if missing:
        later_dims = x.ndim - dim - 1
        unpadded = (0, 0) * later_dims
        x = F.pad(x, (*unpadded, 0, missing))
    return in_blocks(x, dim, block)


def from_blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """The inverse: blocks and their values as one dim, without what filled the last block."""
    joined = x.flatten(dim, dim + 1)
    return joined.narrow(dim, 0, size)


def in_squares(w: Tensor, block: int = BLOCK) -> Tensor:
    """The last two dims as four: (..., I, block, J, block)."""
    rows = in_blocks(w, -2, block)
    return in_blocks(rows, -1, block)


def scale_of_values(scales: Tensor, values: Tensor, block: int = BLOCK) -> Tensor:
    """The scale of every value of a matrix, from scales of blocks of a row or of squares."""
    rows, columns = values.shape[-2:]
    spread = scales.repeat_interleave(block, -1)
    spread = spread.narrow(-1, 0, columns)
    if spread.shape[-2] == rows:
        return spread
    spread = spread.repeat_interleave(block, -2)
    return spread.narrow(-2, 0, rows)


def largest_magnitude(x: Tensor, dim: Dims) -> Tensor:
    """amax in fp32, NaN if any value is NaN."""
    magnitude = x.float().abs()
    return magnitude.amax(dim)


def scale_along(x: Tensor, dim: Dims, rule: ScaleRule) -> Tensor:
    """The scales of blocks whose values lie along a dim."""
    amax = largest_magnitude(x, dim)
    return scale_from_amax(amax, rule)


def scale_from_amax(amax: Tensor, rule: ScaleRule) -> Tensor:
    largest = rule.format.largest
    divisor = torch.full_like(amax, largest)
    scale = amax / divisor  # on a GPU, torch would multiply by the reciprocal of a plain number
    if rule.power_of_two:
        scale = next_power_of_two(scale)
    scale = scale.clamp(min=SMALLEST_SCALE)
    is_zero = amax == 0
    scale = torch.where(is_zero, 1.0, scale)
    is_finite = amax.isfinite()
    return torch.where(is_finite, scale, torch.nan)


def quantise_along(x: Tensor, dim: int, rule: ScaleRule) -> Quantised:
    """Blocks whose values lie along a dim; scales lack that dim."""
    scales = scale_along(x, dim, rule)
    of_values = scales.unsqueeze(dim)
    values = round_to_fp8(x, of_values, rule.format)
    return Quantised(values, scales)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x, for positive normal x."""
    bits = x.view(torch.int32)
    mantissa = (1 << 23) - 1
    rounded = (bits + mantissa) & ~mantissa  # a mantissa other than zero carries into the exponent
    return rounded.view(torch.float32)


def round_to_fp8(x: Tensor, scale: Tensor, format: Fp8Format) -> Tensor:
    """Bytes of x; `scale` is broadcast. Values beyond the largest number of the format become that number."""
    inverse = 1.0 / scale.float()
    scaled = x.float() * inverse
    largest = format.largest
    clamped = scaled.clamp(-largest, largest)
    is_nan = clamped.isnan()
    sound = torch.where(is_nan, torch.nan, clamped)  # one NaN, whatever its sign was
    return sound.to(format.dtype)
