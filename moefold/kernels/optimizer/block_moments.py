"""Moments of AdamW in blocks: 128 neighbouring elements share a scale, the largest magnitude among them.

    fp16, fp8    first moment: x / scale, as fp8 x 256 / scale (e4m3); second moment: the same of its root
    int8         first moment: scale (c / 127)^4 with the sign of c; second moment: its root is scale (c / 255)^4, with
                 c at least one

The fourth power spreads codes evenly over small and large magnitudes: of a block whose magnitudes differ by factors of
thousands, small ones still have several codes. A root of zero would make a step as large as epsilon allows, so the
smallest root of a block is that of code one. Values that were decoded are encoded as the same codes and scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOMENT_BLOCK = 128  # elements; bucket shares and parameters begin at multiples of it
FP8_LARGEST = 256.0  # a power of two, so that the largest magnitude of a block is exact
FP8_SMALLEST = 2.0**-9
FP16_SMALLEST = 2.0**-24
LEVELS = {torch.int8: 127, torch.uint8: 255}


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
    """The dtypes of the codes of both moments, for a value of `optim.moments`; None: moments have no blocks."""
    return CODE_DTYPES.get(name)


def block_count(elements: int) -> int:
    return -(-elements // MOMENT_BLOCK)


def encode_blocks(x: Tensor, dtype: torch.dtype, is_second: bool) -> BlockCodes:
    """The codes of a flat tensor that begins with a block. The second moment is given as it is, not as its root."""
    size = len(x)
    values = x.float()
    if is_second:
        values = values.sqrt()
    padding = -size % MOMENT_BLOCK
    padded = F.pad(values, (0, padding))
    blocks = padded.view(-1, MOMENT_BLOCK)
    scales = blocks.abs().amax(1)
    is_zero = scales == 0
    divisor = scales.masked_fill(is_zero, 1)
    inverse = 1 / divisor
    relative = blocks * inverse[:, None]
    codes = encode_relative(relative, dtype)
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


def smallest_code(dtype: torch.dtype) -> float:
    if dtype in LEVELS:
        return 1.0
    return FP16_SMALLEST if dtype == torch.float16 else FP8_SMALLEST


def decode_blocks(codes: Tensor, scales: Tensor, is_second: bool) -> Tensor:
    """Values of codes that begin with a block, in fp32 as the scales."""
    size = len(codes)
    of_elements = scales.repeat_interleave(MOMENT_BLOCK)[:size]
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
