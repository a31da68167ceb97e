"""Dequantisation of fp8 and mxfp4 weights, box by box, as they are read.

fp8     "X.weight" in F8_E4M3 and "X.weight_scale_inv", one factor for each block of 128 x 128
mxfp4   "X_blocks" (..., rows, n, 16) with two 4-bit numbers a byte and "X_scales" (..., rows, n): n blocks of 32
        numbers share a power of two; "X" itself is (..., 32 n, rows), transposed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moefold.checkpoint.format.boxes import Box, Range
from moefold.checkpoint.format.safetensors_header import StoredTensor
from moefold.checkpoint.hf.quantization_config import FP8_BLOCK

MXFP4_BLOCK = 32  # numbers
MXFP4_BYTES = 16  # of a block
EXPONENT_BIAS = 127  # of the powers of two
FP8_SCALE_SUFFIX = "_scale_inv"
FP8_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
MXFP4_BLOCKS_SUFFIX = "_blocks"
MXFP4_SCALES_SUFFIX = "_scales"
DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # stored by older files; it follows from config.json
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES))  # by code; the highest bit is the sign

RawFetch = Callable[[str, Box], torch.Tensor]  # a box of the stored tensor of that name


@dataclass(frozen=True)
class DequantisedTensor:
    """A tensor as it is after dequantisation. `problem` says why its stored form cannot be read; empty: it can."""

    shape: tuple[int, ...]
    dtype: str
    fetch_box: Callable[[Box], torch.Tensor]
    problem: str = ""


def dequantised_tensors(
    tensors: dict[str, StoredTensor], raw: RawFetch
) -> tuple[dict[str, DequantisedTensor], list[str]]:
    """Every tensor under its own name, scales applied; and the problems of scales and blocks."""
    found: dict[str, DequantisedTensor] = {}
    problems: list[str] = []
    for name, stored in tensors.items():
        if name.endswith(DERIVED_SUFFIX) or is_scale_tensor(name, tensors):
            continue
        if name.endswith(MXFP4_BLOCKS_SUFFIX):
            scales = tensors.get(mxfp4_scales_name(name))
            tensor = dequantised_mxfp4(name, stored, scales, raw)
        elif stored.dtype == "F8_E4M3" or name + FP8_SCALE_SUFFIX in tensors:
            scales = tensors.get(name + FP8_SCALE_SUFFIX)
            tensor = dequantised_fp8(name, stored, scales, raw)
        else:
            tensor = unquantised_tensor(name, stored, raw)
        found[name.removesuffix(MXFP4_BLOCKS_SUFFIX)] = tensor
        if tensor.problem:
            problems.append(tensor.problem)
    return found, problems


def is_scale_tensor(name: str, tensors: dict[str, StoredTensor]) -> bool:
    """Whether a tensor holds the scales of another one that is there."""
    if name.endswith(MXFP4_SCALES_SUFFIX):
        blocks = name.removesuffix(MXFP4_SCALES_SUFFIX) + MXFP4_BLOCKS_SUFFIX
        return blocks in tensors
    weight = name.removesuffix(FP8_SCALE_SUFFIX)
    return weight != name and weight in tensors


def mxfp4_scales_name(blocks: str) -> str:
    return blocks.removesuffix(MXFP4_BLOCKS_SUFFIX) + MXFP4_SCALES_SUFFIX


def unquantised_tensor(name: str, stored: StoredTensor, raw: RawFetch) -> DequantisedTensor:
    def fetch_stored(box: Box) -> torch.Tensor:
        return raw(name, box)

    return DequantisedTensor(stored.shape, stored.dtype, fetch_stored)


def dtype_and_shape(stored: StoredTensor | None) -> str:
    if stored is None:
        return "nothing"
    return f"{stored.dtype} {list(stored.shape)}"


def covering_blocks(start: int, size: int, block: int) -> Range:
    """The range of blocks that covers a range of elements."""
    first = start // block
    last = -(-(start + size) // block)
    return first, last - first


def dequantised_fp8(name: str, stored: StoredTensor, scales: StoredTensor | None, raw: RawFetch) -> DequantisedTensor:
    blocks = [-(-size // FP8_BLOCK) for size in stored.shape]
    expected = tuple(blocks)
    is_matrix = stored.dtype == "F8_E4M3" and len(expected) == 2
    problem = ""
    sound_scales = False
    if scales is not None:
        sound_scales = scales.shape == expected and scales.dtype in FP8_SCALE_DTYPES
    if not is_matrix or not sound_scales:
        kinds = ", ".join(FP8_SCALE_DTYPES)
        problem = (
            f'"{name}" is {dtype_and_shape(stored)} and "{name}{FP8_SCALE_SUFFIX}" is {dtype_and_shape(scales)}; '
            f"expected F8_E4M3 in two dims and factors of shape {list(expected)}, one of {kinds}"
        )

    def fetch_dequantised(box: Box) -> torch.Tensor:
        blocks = [covering_blocks(start, size, FP8_BLOCK) for start, size in box]
        factors = raw(name + FP8_SCALE_SUFFIX, tuple(blocks)).float()
        # One factor per element, of the blocks around the box, cut to the box.
        for dim, (start, size) in enumerate(box):
            repeated = factors.repeat_interleave(FP8_BLOCK, dim)
            factors = repeated.narrow(dim, start % FP8_BLOCK, size)
        return raw(name, box).float() * factors

    return DequantisedTensor(stored.shape, "F32", fetch_dequantised, problem)


def dequantised_mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor | None, raw: RawFetch) -> DequantisedTensor:
    *scales_shape, _ = blocks.shape or (0,)
    last_dim = blocks.shape[-1:]
    sound_blocks = blocks.dtype == "U8" and last_dim == (MXFP4_BYTES,)
    sound_scales = scales is not None and scales.shape == tuple(scales_shape)
    problem = ""
    if not sound_blocks or not sound_scales:
        problem = (
            f'"{name}" is {dtype_and_shape(blocks)} and its scales are {dtype_and_shape(scales)}; '
            f"expected U8, blocks of 16 bytes, and scales of shape {scales_shape}"
        )
    *outer_shape, rows, count = scales_shape or (0, 0)

    def fetch_dequantised(box: Box) -> torch.Tensor:
        # The box is of the transposed tensor: blocks are along its next to last dim.
        *outer, (start, size), columns = box
        first, blocks_needed = covering_blocks(start, size, MXFP4_BLOCK)
        scales_box = (*outer, columns, (first, blocks_needed))
        codes_box = (*scales_box, (0, MXFP4_BYTES))
        codes = raw(name, codes_box)
        powers = raw(mxfp4_scales_name(name), scales_box)
        values = decode_mxfp4(codes, powers)
        values = values.transpose(-1, -2)
        offset = start - first * MXFP4_BLOCK
        return values.narrow(-2, offset, size)

    shape = (*outer_shape, MXFP4_BLOCK * count, rows)
    return DequantisedTensor(shape, "F32", fetch_dequantised, problem)


def decode_mxfp4(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """(..., n, 16) bytes and (..., n) biased powers of two -> (..., 32 n). The low four bits of a byte come first.
    bf16 represents every value exactly."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float32)
    low = codes & 15
    high = codes >> 4
    pairs = torch.stack((low, high), dim=-1)
    pairs = pairs.long()
    exponents = powers.int() - EXPONENT_BIAS
    exponents = exponents[..., None, None]
    values = torch.ldexp(table[pairs], exponents)
    return values.flatten(-3)
