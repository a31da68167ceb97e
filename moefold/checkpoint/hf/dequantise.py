"""Weights that files hold in few bits, made whole as they are read.

fp8     "X.weight" in F8_E4M3 and "X.weight_scale_inv", one factor for each block of 128 x 128
mxfp4   "X_blocks" (..., rows, n, 16) with two 4-bit numbers a byte and "X_scales" (..., rows, n): n blocks of 32
        numbers share a power of two; "X" itself is (..., 32 n, rows), transposed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moefold.checkpoint.format.boxes import Range
from moefold.checkpoint.hf.model_folder import StoredTensor

FP8_BLOCK = 128
FP8_SCALE_SUFFIX, MXFP4_BLOCKS_SUFFIX, MXFP4_SCALES_SUFFIX = "_scale_inv", "_blocks", "_scales"
DERIVED_SUFFIX = (
    ".rotary_emb.inv_freq"  # what older files keep though it follows from config.json, which is what is read
)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
RawFetch = Callable[[str, tuple[Range, ...]], torch.Tensor]


@dataclass(frozen=True)
class DequantisedTensor:
    """A tensor as it is once its quantisation is undone."""

    shape: tuple[int, ...]
    dtype: str
    fetch_box: Callable[[tuple[Range, ...]], torch.Tensor]


def dequantised_tensors(
    tensors: dict[str, StoredTensor], raw: RawFetch
) -> tuple[dict[str, DequantisedTensor], list[str]]:
    """Every tensor under its own name, the factors gone into it; and what is wrong with factors and blocks."""
    found: dict[str, DequantisedTensor] = {}
    problems: list[str] = []
    for name, stored in tensors.items():
        if name.endswith(DERIVED_SUFFIX):
            continue
        if (
            name.endswith(MXFP4_SCALES_SUFFIX)
            and name.removesuffix(MXFP4_SCALES_SUFFIX) + MXFP4_BLOCKS_SUFFIX in tensors
        ):
            continue
        if name.endswith(FP8_SCALE_SUFFIX) and name.removesuffix(FP8_SCALE_SUFFIX) in tensors:
            continue
        if name.endswith(MXFP4_BLOCKS_SUFFIX):
            whole, problem = dequantised_mxfp4(
                name, stored, tensors.get(name.removesuffix(MXFP4_BLOCKS_SUFFIX) + MXFP4_SCALES_SUFFIX), raw
            )
            found[name.removesuffix(MXFP4_BLOCKS_SUFFIX)] = whole
        elif stored.dtype == "F8_E4M3" or name + FP8_SCALE_SUFFIX in tensors:
            found[name], problem = dequantised_fp8(name, stored, tensors.get(name + FP8_SCALE_SUFFIX), raw)
        else:
            found[name], problem = DequantisedTensor(stored.shape, stored.dtype, fetch_unquantised(name, raw)), ""
        problems += [problem] if problem else []
    return found, problems


def fetch_unquantised(name: str, raw: RawFetch) -> Callable[[tuple[Range, ...]], torch.Tensor]:
    return lambda box: raw(name, box)


def dequantised_fp8(
    name: str, stored: StoredTensor, scale: StoredTensor | None, raw: RawFetch
) -> tuple[DequantisedTensor, str]:
    expected = tuple(-(-size // FP8_BLOCK) for size in stored.shape)
    problem = ""
    if scale is None or stored.dtype != "F8_E4M3" or len(expected) != 2 or scale.shape != expected:
        there = f"{scale.dtype} {list(scale.shape)}" if scale else "nothing"
        problem = (
            f'"{name}" is {stored.dtype} {list(stored.shape)} and "{name}{FP8_SCALE_SUFFIX}" is {there}; '
            f"expected F8_E4M3 in two dims and factors of shape {list(expected)}"
        )

    def fetch_dequantised(box: tuple[Range, ...]) -> torch.Tensor:
        around = tuple(
            (start // FP8_BLOCK, -(-(start + size) // FP8_BLOCK) - start // FP8_BLOCK) for start, size in box
        )
        factors = raw(name + FP8_SCALE_SUFFIX, around).float()
        for dim, (start, size) in enumerate(box):
            factors = factors.repeat_interleave(FP8_BLOCK, dim).narrow(dim, start % FP8_BLOCK, size)
        return raw(name, box).float() * factors

    return DequantisedTensor(stored.shape, "F32", fetch_dequantised), problem


def dequantised_mxfp4(
    name: str, blocks: StoredTensor, scales: StoredTensor | None, raw: RawFetch
) -> tuple[DequantisedTensor, str]:
    problem = ""
    if scales is None or blocks.dtype != "U8" or blocks.shape[-1:] != (16,) or scales.shape != blocks.shape[:-1]:
        there = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        problem = (
            f'"{name}" is {blocks.dtype} {list(blocks.shape)} and its scales are {there}; '
            f"expected U8, blocks of 16 bytes, and scales of shape {list(blocks.shape[:-1])}"
        )
    *stacked, rows, count = blocks.shape[:-1] or (0, 0)

    def fetch_dequantised(box: tuple[Range, ...]) -> torch.Tensor:
        *outer, (start, size), across = box  # theirs, which is the transposed: blocks lie along the next to last dim
        first, last = start // 32, -(-(start + size) // 32)
        around = (*outer, across, (first, last - first))
        codes, powers = (
            raw(name, (*around, (0, 16))),
            raw(name.removesuffix(MXFP4_BLOCKS_SUFFIX) + MXFP4_SCALES_SUFFIX, around),
        )
        values = decode_mxfp4(codes, powers)
        return values.transpose(-1, -2).narrow(-2, start - first * 32, size)

    return DequantisedTensor((*stacked, 32 * count, rows), "F32", fetch_dequantised), problem


def decode_mxfp4(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """(..., n, 16) bytes and (..., n) powers of two, biased by 127 -> (..., 32 n). The lower half of a byte is first.
    Every value is one that bf16 has."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float32)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).long()
    values = torch.ldexp(table[pairs], (powers.int() - 127)[..., None, None])
    return values.flatten(-3)
