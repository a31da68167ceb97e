"""Weights that files hold in few bits, made whole as they are read.

fp8     "X.weight" in F8_E4M3 and "X.weight_scale_inv", one factor for each block of 128 x 128
mxfp4   "X_blocks" (..., rows, n, 16) with two 4-bit numbers a byte and "X_scales" (..., rows, n): n blocks of 32
        numbers share a power of two; "X" itself is (..., 32 n, rows), transposed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moefold.checkpoint.boxes import Range
from moefold.checkpoint.hf.folder import Stored

BLOCK = 128
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
DERIVED = ".rotary_emb.inv_freq"  # what older files keep though it follows from config.json, which is what is read
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Raw = Callable[[str, tuple[Range, ...]], torch.Tensor]


@dataclass(frozen=True)
class Whole:
    """A tensor as it is once its quantisation is undone."""

    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[tuple[Range, ...]], torch.Tensor]


def undone(tensors: dict[str, Stored], raw: Raw) -> tuple[dict[str, Whole], list[str]]:
    """Every tensor under its own name, the factors gone into it; and what is wrong with factors and blocks."""
    found: dict[str, Whole] = {}
    problems: list[str] = []
    for name, stored in tensors.items():
        if name.endswith(DERIVED):
            continue
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors:
            continue
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        if name.endswith(BLOCKS):
            whole, problem = of_fp4(name, stored, tensors.get(name.removesuffix(BLOCKS) + SCALES), raw)
            found[name.removesuffix(BLOCKS)] = whole
        elif stored.dtype == "F8_E4M3" or name + SCALE in tensors:
            found[name], problem = of_fp8(name, stored, tensors.get(name + SCALE), raw)
        else:
            found[name], problem = Whole(stored.shape, stored.dtype, plain(name, raw)), ""
        problems += [problem] if problem else []
    return found, problems


def plain(name: str, raw: Raw) -> Callable[[tuple[Range, ...]], torch.Tensor]:
    return lambda box: raw(name, box)


def of_fp8(name: str, stored: Stored, scale: Stored | None, raw: Raw) -> tuple[Whole, str]:
    expected = tuple(-(-size // BLOCK) for size in stored.shape)
    problem = ""
    if scale is None or stored.dtype != "F8_E4M3" or len(expected) != 2 or scale.shape != expected:
        there = f"{scale.dtype} {list(scale.shape)}" if scale else "nothing"
        problem = (
            f'"{name}" is {stored.dtype} {list(stored.shape)} and "{name}{SCALE}" is {there}; '
            f"expected F8_E4M3 in two dims and factors of shape {list(expected)}"
        )

    def fetch(box: tuple[Range, ...]) -> torch.Tensor:
        around = tuple((start // BLOCK, -(-(start + size) // BLOCK) - start // BLOCK) for start, size in box)
        factors = raw(name + SCALE, around).float()
        for dim, (start, size) in enumerate(box):
            factors = factors.repeat_interleave(BLOCK, dim).narrow(dim, start % BLOCK, size)
        return raw(name, box).float() * factors

    return Whole(stored.shape, "F32", fetch), problem


def of_fp4(name: str, blocks: Stored, scales: Stored | None, raw: Raw) -> tuple[Whole, str]:
    problem = ""
    if scales is None or blocks.dtype != "U8" or blocks.shape[-1:] != (16,) or scales.shape != blocks.shape[:-1]:
        there = f"{scales.dtype} {list(scales.shape)}" if scales else "nothing"
        problem = (
            f'"{name}" is {blocks.dtype} {list(blocks.shape)} and its scales are {there}; '
            f"expected U8, blocks of 16 bytes, and scales of shape {list(blocks.shape[:-1])}"
        )
    *stacked, rows, count = blocks.shape[:-1] or (0, 0)

    def fetch(box: tuple[Range, ...]) -> torch.Tensor:
        *outer, (start, size), across = box  # theirs, which is the transposed: blocks lie along the next to last dim
        first, last = start // 32, -(-(start + size) // 32)
        around = (*outer, across, (first, last - first))
        codes, powers = raw(name, (*around, (0, 16))), raw(name.removesuffix(BLOCKS) + SCALES, around)
        values = fp4_values(codes, powers)
        return values.transpose(-1, -2).narrow(-2, start - first * 32, size)

    return Whole((*stacked, 32 * count, rows), "F32", fetch), problem


def fp4_values(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """(..., n, 16) bytes and (..., n) powers of two, biased by 127 -> (..., 32 n). The lower half of a byte is first.
    Every value is one that bf16 has."""
    table = torch.tensor(FP4, dtype=torch.float32)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).long()
    values = torch.ldexp(table[pairs], (powers.int() - 127)[..., None, None])
    return values.flatten(-3)
