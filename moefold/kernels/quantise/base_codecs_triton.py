"""Blocks of a frozen base to rows, in Triton (rule: base_codecs.py). Imported only where Triton is.

A program takes a tile of bytes and looks values and scales up where a byte is: neighbours find them in the cache, and
nothing moves between threads. Each step is one fp32 or integer instruction, as in the reference, so that values are the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.config.base_formats import BASE_FORMATS, WIDEST_SCALE, BaseFormat
from moefold.kernels.quantise import nf4_double
from moefold.kernels.quantise.mx_blocks_triton import power_of_two
from moefold.kernels.quantise.mxfp4 import E2M1_NUMBERS
from moefold.kernels.quantise.nf4 import NF4_NUMBERS
from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, program_block, tile_mask, tile_pointers

TILE_ROWS = 16
TILE_BYTES = 128
NUMBERS = {"nf4": NF4_NUMBERS, "nf4_double": NF4_NUMBERS, "mxfp4": E2M1_NUMBERS}  # of the codes of four bits
STEPS = constexpr(nf4_double.STEPS)


@triton.jit
def block_scales(
    scales,
    tops,
    row,
    block,
    inside,
    scale_width,
    top_width,
    FORMAT: constexpr,
    GROUP: constexpr,
):
    """The scale of every byte of a tile, in fp32."""
    at = tile_pointers(scales, row, block, scale_width)
    if FORMAT == "nf4":
        return load_as_fp32(at, inside)
    elif FORMAT == "nf4_double":
        number = load_as_fp32(at, inside)
        group = block // GROUP
        top_at = tile_pointers(tops, row, group, top_width)
        top = load_or_zero(top_at, inside)
        return tl.div_rn(top * number, STEPS)
    else:
        byte = load_or_zero(at, inside)
        return power_of_two(byte.to(tl.int32))


@triton.jit
def dequantise_rows_kernel(
    values,
    scales,
    tops,
    numbers,
    out,
    rows,
    row_bytes,
    scale_width,
    top_width,
    width,
    FORMAT: constexpr,
    BLOCK: constexpr,
    GROUP: constexpr,
    TILE_ROWS: constexpr,
    TILE_BYTES: constexpr,
):
    """BLOCK: bytes of a block. `tops`: fp32 scales of GROUP scales each."""
    row = program_block(0, TILE_ROWS).to(tl.int64)
    c = program_block(1, TILE_BYTES)
    is_row = row < rows
    inside = tile_mask(is_row, c < row_bytes)
    at = tile_pointers(values, row, c, row_bytes)
    scale = block_scales(scales, tops, row, c // BLOCK, inside, scale_width, top_width, FORMAT, GROUP)
    if FORMAT == "fp8":
        byte = tl.load(at, mask=inside, other=0.0)
        x = byte.to(tl.float32) * scale
        n = c
    else:
        code = load_or_zero(at, inside).to(tl.int32)
        low = tl.load(numbers + (code & 15)) * scale
        high = tl.load(numbers + (code >> 4)) * scale
        pairs = tl.join(low, high) if FORMAT == "mxfp4" else tl.join(high, low)
        shape: constexpr = (TILE_ROWS, 2 * TILE_BYTES)
        x = tl.reshape(pairs, shape)
        n = program_block(1, 2 * TILE_BYTES)
    at = tile_pointers(out, row, n, width)
    tl.store(at, x.to(out.dtype.element_ty), mask=tile_mask(is_row, n < width))


@cache
def numbers_of_codes(numbers: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def fp32_tops(scales: Tensor, format: BaseFormat, width: int) -> Tensor | None:
    """The fp32 scales of scales, whose bytes stand behind those of a row's scales: where they are, if fp32 numbers can
    lie there."""
    if not format.group:
        return None
    blocks = format.blocks(width)
    places = (blocks, scales.shape[-1], scales.storage_offset())
    if any(place % WIDEST_SCALE for place in places):
        tail = scales[..., blocks:]
        return tail.clone(memory_format=torch.contiguous_format).view(torch.float32)
    first = blocks // WIDEST_SCALE
    return scales.view(torch.float32)[..., first:]


def launch_dequantise_rows(values: Tensor, scales: Tensor, format: str, width: int, dtype: torch.dtype) -> Tensor:
    *lead, row_bytes = values.shape
    out = values.new_empty((*lead, width), dtype=dtype)
    if out.numel() == 0:
        return out
    form = BASE_FORMATS[format]
    values = values.contiguous()
    scales = scales.contiguous()
    tops = fp32_tops(scales, form, width)
    rows = out.numel() // width
    numbers = numbers_of_codes(NUMBERS[format], values.device) if format in NUMBERS else None
    tensors = (values, scales, tops, numbers, out)
    top_width = 0 if tops is None else tops.stride(-2)
    sizes = (rows, row_bytes, scales.shape[-1], top_width, width)
    block_bytes = form.block * form.bits // 8
    constants = {"FORMAT": format, "BLOCK": block_bytes, "GROUP": form.group}
    tile = {"TILE_ROWS": TILE_ROWS, "TILE_BYTES": TILE_BYTES}
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(row_bytes, TILE_BYTES))
    launch = dequantise_rows_kernel[grid]
    launch(*tensors, *sizes, **constants, **tile)
    return out
