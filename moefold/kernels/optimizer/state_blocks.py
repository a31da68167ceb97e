"""States of AdamW in blocks: 128 neighbouring elements share a scale, the largest magnitude among them.

    fp16, fp8    signed: x / scale, as fp8 x 256 / scale (e4m3); second moment: the same of its root
    int8         signed: scale (c / 127)^4 with the sign of c; second moment: its root is scale (c / 255)^4, with c at
                 least one

Signed are gradients, main weights and the first moment. These may be rounded stochastically: to one of the two codes
beside a value, the nearer one more often, so that the mean is the value.

The fourth power spreads codes evenly over small and large magnitudes: of a block whose magnitudes differ by factors of
thousands, small ones still have several codes. A root of zero would make a step as large as epsilon allows, so the
smallest root of a block is that of code one. Values that were decoded are encoded as the same codes and scales, but
for stochastic rounding of fp16 and fp8, in which the last bit of a product may count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

STATE_BLOCK = 128  # elements; bucket shares and parameters begin at multiples of it
FP8_LARGEST = 256.0  # a power of two, so that the largest magnitude of a block is exact
FP8_SMALLEST = 2.0**-9
FP16_SMALLEST = 2.0**-24
LEVELS = {torch.int8: 127, torch.uint8: 255}
DROPPED_BITS = {torch.float16: 13, torch.float8_e4m3fn: 20}  # of the bits of fp32
RANDOM_BITS = 16


CODE_DTYPES = {
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (torch.int8, torch.uint8),
}


class BlockCodes(NamedTuple):
    """Codes of elements, and one fp32 scale for each block of them."""

    codes: Tensor
    scales: Tensor


def block_dtypes(name: str) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtypes of signed codes and of the second moment's, for the name of a type; None: it has no blocks."""
    return CODE_DTYPES.get(name)


def block_count(elements: int) -> int:
    return -(-elements // STATE_BLOCK)


def encode_blocks(
    x: Tensor, dtype: torch.dtype, is_second: bool, random_bits: Tensor | None = None
) -> BlockCodes:  # fmt: skip
    """The codes of a flat tensor that begins with a block. The second moment is given as it is, not as its root.
    `random_bits`: 16 for each element of signed values, which are then rounded stochastically."""
    size = len(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    if is_second:
        values = values.sqrt()
    padding = -size % STATE_BLOCK
    padded = F.pad(values, (0, padding))
    blocks = padded.view(-1, STATE_BLOCK)
    scales = blocks.abs().amax(1)
    is_zero = scales == 0
    divisor = scales.masked_fill(is_zero, 1)
    inverse = 1 / divisor
    relative = blocks * inverse[:, None]
    if random_bits is None:
        codes = encode_relative(relative, dtype)
    else:
        random_blocks = F.pad(random_bits, (0, padding)).view(-1, STATE_BLOCK)
        codes = encode_stochastically(relative, dtype, random_blocks)
    if is_second:
        smallest = smallest_code(dtype)
        clamped = codes.float().clamp(min=smallest)
        codes = clamped.to(dtype)
    codes = codes.flatten()[:size]
    return BlockCodes(codes.clone(), scales)


def encode_relative(relative: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of values between -1 and 1."""
    if dtype in LEVELS:
        root = relative.abs().sqrt()
        fourth_root = root.sqrt()
        scaled = fourth_root * LEVELS[dtype]
        code = scaled.round().copysign(relative)
        return code.to(dtype)
    if dtype == torch.float8_e4m3fn:
        relative = relative * FP8_LARGEST
    return relative.to(dtype)


def encode_stochastically(relative: Tensor, dtype: torch.dtype, random_bits: Tensor) -> Tensor:
    """Codes of signed values between -1 and 1, each one of the two beside the value."""
    if dtype in LEVELS:
        return encode_power_stochastically(relative, dtype, random_bits)
    dropped = DROPPED_BITS[dtype]
    added = random_bits << dropped >> RANDOM_BITS
    bits = relative.view(torch.int32) + added.to(torch.int32)
    kept = bits >> dropped << dropped
    return encode_relative(kept.view(torch.float32), dtype)


def encode_power_stochastically(relative: Tensor, dtype: torch.dtype, random_bits: Tensor) -> Tensor:
    """The fourth power's codes: by the distances of values, not of codes."""
    levels = LEVELS[dtype]
    magnitude = relative.abs()
    root = magnitude.sqrt()
    fourth_root = root.sqrt()
    scaled = fourth_root * levels
    below = scaled.floor().clamp(max=levels - 1)
    value_below = below**4
    step = (below + 1) ** 4 - value_below
    share = (random_bits + 0.5) / 2**RANDOM_BITS
    is_above = magnitude * levels**4 - value_below > share * step
    code = (below + is_above).copysign(relative)
    return code.to(dtype)


def smallest_code(dtype: torch.dtype) -> float:
    if dtype in LEVELS:
        return 1.0
    return FP16_SMALLEST if dtype == torch.float16 else FP8_SMALLEST


def decode_blocks(codes: Tensor, scales: Tensor, is_second: bool) -> Tensor:
    """Values of codes that begin with a block, in fp32 as the scales."""
    size = len(codes)
    of_elements = scales.repeat_interleave(STATE_BLOCK)[:size]
    relative = decode_relative(codes, scales.dtype)
    values = relative * of_elements
    return values.square() if is_second else values


def decode_relative(codes: Tensor, wide: torch.dtype) -> Tensor:
    values = codes.to(wide)
    if codes.dtype in LEVELS:
        levels = LEVELS[codes.dtype]
        inverse = values.new_tensor(1 / levels)
        fourth_root = values * inverse
        square = fourth_root * fourth_root
        magnitude = square * square
        return magnitude.copysign(values)
    if codes.dtype == torch.float8_e4m3fn:
        return values * (1 / FP8_LARGEST)
    return values
