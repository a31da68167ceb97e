"""NVFP4: E2M1 values in blocks of 16 along the contraction, an E4M3 scale for each block, an fp32 scale for them all.

    encode  = min(448 * 6 / amax of all, largest fp32); 1 if amax is 0 or encode is 0
    scale   = E4M3(min(amax of the block * (encode * (1 / 6)), 448))
    factor  = min(1 / (scale * (1 / encode)), largest fp32)
    q       = E2M1(x * factor), clamped to 6

and x is about q * scale / encode. Each operation is one fp32 operation, in this order. E2M1 has the magnitudes 0, 0.5,
1, 1.5, 2, 3, 4, 6. Rounding to nearest takes the even code of two that are equally near; stochastic rounding takes the
larger magnitude with a probability that differs by at most 2^-17 from the one that makes the mean exact, and never for
a number that E2M1 has. Two values share a byte, the first in the low half.

Weights have blocks of 16 x 16, so that both layouts dequantise to the same numbers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.precision_recipes import NV_BLOCK
from moefold.kernels.quantise.fp8 import E4M3, SQUARE, in_blocks, in_squares, largest_magnitude, scale_of_values

E2M1_LARGEST = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, E2M1_LARGEST)  # by code
LARGEST_CODE = 7
SIGN_CODE = 8
LARGEST_FP32 = torch.finfo(torch.float32).max
RANDOM_BITS = 16  # of a random number, as of a generator's (counter_random.py)
FINEST = 2.0**-23  # to a multiple of which magnitudes are brought before they are rounded stochastically


class Nvfp4(NamedTuple):
    """`packed`: uint8, two codes a byte, so that its last dim is half as long. `scales`: E4M3, one for 16 values of a
    row, or for a square of 16 x 16. `encode`: fp32, one for a matrix, with as many dims as `packed`."""

    packed: Tensor
    scales: Tensor
    encode: Tensor


def encode_scale(amax: Tensor) -> Tensor:
    """The fp32 scale by which values with this largest magnitude are multiplied."""
    product = E4M3.largest * E2M1_LARGEST
    largest = torch.full_like(amax, product)
    encode = largest / amax
    encode = encode.clamp(max=LARGEST_FP32)
    is_zero = amax == 0
    has_none = is_zero | (encode == 0)
    return torch.where(has_none, 1.0, encode)


def block_scale(amax: Tensor, encode: Tensor) -> Tensor:
    """E4M3; zero for a block of zeros, and for one whose scale is too small."""
    number = 1.0 / E2M1_LARGEST
    sixth = encode.new_full((), number)
    scale = amax * (encode * sixth)
    scale = scale.clamp(max=E4M3.largest)
    return scale.to(E4M3.dtype)


def block_factor(scale: Tensor, encode: Tensor) -> Tensor:
    """What the values of a block are multiplied by."""
    decode = encode.reciprocal()
    decoded = scale.float() * decode
    factor = decoded.reciprocal()
    return factor.clamp(max=LARGEST_FP32)


def quantise_nvfp4(x: Tensor, amax: Tensor, random: Tensor | None = None) -> Nvfp4:
    """Blocks along the last dim, whose size is a multiple of 16. `amax`: of the matrix that a row belongs to, such that
    it broadcasts against x. `random`: numbers of 32 bits as int64, one for each value; None rounds to nearest."""
    wide = x.float()
    blocks = in_blocks(wide, -1, NV_BLOCK)
    encode = encode_scale(amax.float())
    of_blocks = largest_magnitude(blocks, -1)
    scales = block_scale(of_blocks, encode)
    factors = block_factor(scales, encode)
    scaled = blocks * factors[..., None]
    scaled = scaled.flatten(-2)
    codes = round_to_e2m1(scaled, random)
    packed = pack_e2m1(codes)
    return Nvfp4(packed, scales, encode)


def quantise_nvfp4_squares(w: Tensor, amax: Tensor | None = None) -> Nvfp4:
    """Blocks of 16 x 16 in the last two dims, and an encoding scale for each matrix. `amax`: of each matrix, if it is
    known, (..., 1, 1)."""
    wide = w.float()
    blocks = in_squares(wide, NV_BLOCK)
    of_blocks = largest_magnitude(blocks, SQUARE)
    of_matrix = of_blocks.amax((-2, -1), keepdim=True) if amax is None else amax
    encode = encode_scale(of_matrix.float())
    scales = block_scale(of_blocks, encode)
    factors = block_factor(scales, encode)
    of_squares = factors[..., :, None, :, None]
    scaled = blocks * of_squares
    scaled = scaled.reshape(w.shape)
    codes = round_to_e2m1(scaled)
    packed = pack_e2m1(codes)
    return Nvfp4(packed, scales, encode)


def round_to_e2m1(x: Tensor, random: Tensor | None = None) -> Tensor:
    """Codes of 4 bits, uint8. Values beyond 6 become 6; NaN becomes 6, and the block's scale is NaN then."""
    magnitude = x.abs()
    magnitude = magnitude.clamp(max=E2M1_LARGEST)
    step = step_of_grid(magnitude)
    if random is None:
        steps = magnitude / step
        whole = steps.round()  # ties to even
    else:
        whole = whole_at_random(magnitude, step, random)
    code = code_of_magnitude(whole * step)
    is_nan = x.isnan()
    code = torch.where(is_nan, LARGEST_CODE, code)
    signed = code + SIGN_CODE * x.signbit()
    return signed.to(torch.uint8)


def whole_at_random(magnitude: Tensor, step: Tensor, random: Tensor) -> Tensor:
    """Whole steps: up if the part of a step behind them and a random number in (0, 1) are one or more. All sums below 4
    are exact, and no larger one is rounded across a whole number."""
    parts = magnitude / FINEST
    steps = parts.round() * FINEST / step
    middle = 2 * random + 1
    chance = middle.float() * 2.0 ** -(RANDOM_BITS + 1)
    raised = steps + chance
    return raised.floor()


def step_of_grid(magnitude: Tensor) -> Tensor:
    """The distance of the two E2M1 magnitudes around a value. Values in steps are even where codes are."""
    from_2 = magnitude >= 2
    from_4 = magnitude >= 4
    step = torch.full_like(magnitude, 0.5)
    step = torch.where(from_2, 1.0, step)
    return torch.where(from_4, 2.0, step)


def code_of_magnitude(magnitude: Tensor) -> Tensor:
    """The code of a magnitude that E2M1 has."""
    small = magnitude * 2  # 0, 0.5, ... 2 have the codes 0 to 4
    medium = magnitude + 2  # 2, 3, 4: 4 to 6
    above_2 = magnitude > 2
    code = torch.where(above_2, medium, small)
    above_4 = magnitude > 4
    return torch.where(above_4, 7.0, code)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dim, the first in the low half."""
    pairs = in_blocks(codes, -1, 2)
    low, high = pairs.unbind(-1)
    return low | (high << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """fp32 values of packed codes."""
    low = packed & 15
    high = packed >> 4
    pairs = torch.stack((low, high), -1)
    codes = pairs.flatten(-2)
    values = e2m1_values(packed.device)
    return values[codes.long()]


@cache
def e2m1_values(device: torch.device) -> Tensor:
    """The value of each code, uploaded once."""
    positive = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def dequantise_nvfp4(quantised: Nvfp4) -> Tensor:
    """fp32 values q * scale * (1 / encode). The first product is exact, in bf16 too."""
    unscaled = unscaled_nvfp4(quantised)
    decode = quantised.encode.reciprocal()
    return unscaled * decode


def unscaled_nvfp4(quantised: Nvfp4) -> Tensor:
    """q * scale, exact: what a product multiplies before it applies 1 / encode to its sums."""
    values = unpack_e2m1(quantised.packed)
    scales = quantised.scales.float()
    return values * scale_of_values(scales, values, NV_BLOCK)
