"""FP8 payloads in Triton (rule: fp8_payload.py). Imported only where Triton is.

The blocks of rows are numbered through; a program takes a few of them, a span of their values at a time. Scales lie
anywhere among the bytes, so they are read and written byte by byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Fp8Format, ScaleRule, blocks_for
from moefold.kernels.quantise.fp8_payload import SCALE_BYTES, row_payload_bytes
from moefold.kernels.quantise.fp8_triton import magnitude_bits, round_to_fp8, scale_from_bits
from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, numbers_from, program_block, tile_mask

BYTES = constexpr(SCALE_BYTES)
TILE_VALUES = 2048
SUM_OPTIONS = {"enable_fp_fusion": False}  # a product is rounded before it is added, as in the reference
CHANNELS = 32  # of a tile
NUMBERS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


@triton.jit
def store_scales(
    at,
    scale,
    inside,
):
    bits = scale.to(tl.uint32, bitcast=True)
    for number in tl.static_range(BYTES):
        tl.store(at + number, (bits >> (8 * number)).to(tl.uint8), mask=inside)


@triton.jit
def load_scale_bytes(at, inside):
    bits = load_or_zero(at, inside).to(tl.uint32)
    for number in tl.static_range(1, BYTES):
        byte = load_or_zero(at + number, inside).to(tl.uint32)
        bits = bits | (byte << (8 * number))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def blocks_of_rows(
    N,
    D,
    block,
    BLOCKS: constexpr,
):
    """Of each block: its row in 64 bits, its number there, its first value, and how many it has."""
    blocks = tl.cdiv(D, block)
    number = program_block(0, BLOCKS)
    row = number // blocks
    j = number % blocks
    first = j * block
    size = tl.where(row < N, tl.minimum(D - first, block), 0)
    return row.to(tl.int64), j, first, size


@triton.jit
def rows_to_payload_kernel(
    x_ND,
    payload_NB,
    N,
    D,
    B,
    stride_n,
    stride_d,
    block,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    NUMBERS: constexpr,
    BLOCKS: constexpr,
    SPAN: constexpr,
):
    row, j, first, size = blocks_of_rows(N, D, block, BLOCKS)
    source = x_ND + row * stride_n
    # scales
    bits = tl.zeros((BLOCKS,), tl.int32)
    for begin in range(0, block, SPAN):
        c = numbers_from(begin, SPAN)
        column = first[:, None] + c[None, :]
        at = source[:, None] + column.to(tl.int64) * stride_d
        x = load_as_fp32(at, c[None, :] < size[:, None])
        bits = tl.maximum(bits, tl.max(magnitude_bits(x), 1))
    scale = scale_from_bits(bits, LARGEST, POWER_OF_TWO)
    payload = payload_NB + row * B
    store_scales(payload + D + j * BYTES, scale, size > 0)
    # values
    for begin in range(0, block, SPAN):
        c = numbers_from(begin, SPAN)
        column = first[:, None] + c[None, :]
        inside = c[None, :] < size[:, None]
        at = source[:, None] + column.to(tl.int64) * stride_d
        q = round_to_fp8(load_as_fp32(at, inside), scale[:, None], LARGEST, NUMBERS)
        tl.store(payload[:, None] + column, q.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def sum_payload_rows_kernel(
    total_ND,
    payload_nNB,
    ranks,
    N,
    D,
    stride_r,
    stride_n,
    total_stride,
    block,
    NUMBERS: constexpr,
    BLOCKS: constexpr,
    SPAN: constexpr,
):
    row, j, first, size = blocks_of_rows(N, D, block, BLOCKS)
    out = total_ND + row * total_stride
    SUM: constexpr = tl.float64 if total_ND.dtype.element_ty == tl.float64 else tl.float32
    for begin in range(0, block, SPAN):
        c = numbers_from(begin, SPAN)
        column = first[:, None] + c[None, :]
        inside = c[None, :] < size[:, None]
        payload = payload_nNB + row * stride_n
        total = row_values(payload, D, j, column, size, inside, NUMBERS).to(SUM)
        for _ in range(1, ranks):
            payload += stride_r
            total += row_values(payload, D, j, column, size, inside, NUMBERS).to(SUM)
        tl.store(out[:, None] + column, total.to(total_ND.dtype.element_ty), mask=inside)


@triton.jit
def row_values(
    payload,
    D,
    j,
    column,
    size,
    inside,
    NUMBERS: constexpr,
):
    scale = load_scale_bytes(payload + D + j * BYTES, size > 0)
    q = load_or_zero(payload[:, None] + column, inside).to(NUMBERS, bitcast=True)
    return q.to(tl.float32) * scale[:, None]


@triton.jit
def group_tile(
    N,
    D,
    TILE: constexpr,
    CHANNELS: constexpr,
):
    """The group of 128 rows and the channels of this program, which values exist, and where they lie."""
    n = program_block(0, TILE)
    d = program_block(1, CHANNELS)
    inside = tile_mask(n < N, d < D)
    at = n.to(tl.int64)[:, None] * D + d[None, :]
    values = tl.cast(N, tl.int64) * D  # one row is a plain number here
    scale_at = values + (tl.program_id(0).to(tl.int64) * D + d) * BYTES
    return n, d, inside, at, scale_at


@triton.jit
def channels_to_payload_kernel(
    x_ND,
    payload_B,
    N,
    D,
    stride_n,
    stride_d,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    NUMBERS: constexpr,
    TILE: constexpr,
    CHANNELS: constexpr,
):
    n, d, inside, at, scale_at = group_tile(N, D, TILE, CHANNELS)
    source = x_ND + n.to(tl.int64)[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = load_as_fp32(source, inside)
    scale = scale_from_bits(tl.max(magnitude_bits(x), 0), LARGEST, POWER_OF_TWO)
    store_scales(payload_B + scale_at, scale, d < D)
    q = round_to_fp8(x, scale[None, :], LARGEST, NUMBERS)
    tl.store(payload_B + at, q.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def payloads_to_channels_kernel(
    x_nND,
    payload_nB,
    N,
    D,
    stride_r,
    NUMBERS: constexpr,
    TILE: constexpr,
    CHANNELS: constexpr,
):
    _, d, inside, at, scale_at = group_tile(N, D, TILE, CHANNELS)
    rank = tl.program_id(2).to(tl.int64)
    payload = payload_nB + rank * stride_r
    scale = load_scale_bytes(payload + scale_at, d < D)
    q = load_or_zero(payload + at, inside).to(NUMBERS, bitcast=True)
    x = q.to(tl.float32) * scale[None, :]
    out = x_nND + rank * N * D + at
    tl.store(out, x.to(x_nND.dtype.element_ty), mask=inside)


class RowPlan(NamedTuple):
    """The grid of a launch over blocks of rows, and the sizes of its tiles."""

    grid: tuple[int]
    constants: dict[str, Any]


def plan_rows(
    rows: int,
    width: int,
    block: int,
    format: Fp8Format,
) -> RowPlan:
    """Short blocks share a program; of a long one a program has one span at a time."""
    longest = triton.next_power_of_2(max(block, 16))
    span = min(longest, TILE_VALUES)
    blocks = TILE_VALUES // span
    count = rows * blocks_for(width, block)
    constants = {"NUMBERS": NUMBERS[format.name], "BLOCKS": blocks, "SPAN": span}
    return RowPlan((triton.cdiv(count, blocks),), constants)


def launch_rows_to_payload(
    x_ND: Tensor,
    rule: ScaleRule,
    block: int,
) -> Tensor:
    rows, width = x_ND.shape
    each = row_payload_bytes(width, block)
    payload_NB = x_ND.new_empty((rows, each), dtype=torch.uint8)
    if payload_NB.numel():
        plan = plan_rows(rows, width, block, rule.format)
        launch = rows_to_payload_kernel[plan.grid]
        sizes = (rows, width, each, *x_ND.stride(), block)
        launch(
            x_ND,
            payload_NB,
            *sizes,
            rule.format.largest,
            rule.power_of_two,
            **plan.constants,
        )
    return payload_NB


def launch_sum_payload_rows(
    total_ND: Tensor,
    payload_nNB: Tensor,
    format: Fp8Format,
    block: int,
) -> None:
    if total_ND.numel() == 0:
        return
    rows, width = total_ND.shape
    assert payload_nNB.stride(2) == total_ND.stride(1) == 1, "values of a row lie side by side"
    plan = plan_rows(rows, width, block, format)
    strides = (payload_nNB.stride(0), payload_nNB.stride(1), total_ND.stride(0))
    launch = sum_payload_rows_kernel[plan.grid]
    sizes = (len(payload_nNB), rows, width, *strides, block)
    launch(
        total_ND,
        payload_nNB,
        *sizes,
        **plan.constants,
        **SUM_OPTIONS,
    )


def channel_payload_bytes(rows: int, width: int) -> int:
    groups = blocks_for(rows)
    return rows * width + SCALE_BYTES * groups * width


def launch_channels_to_payload(x_ND: Tensor, rule: ScaleRule) -> Tensor:
    rows, width = x_ND.shape
    count = channel_payload_bytes(rows, width)
    payload_B = x_ND.new_empty(count, dtype=torch.uint8)
    if count:
        grid = (blocks_for(rows), triton.cdiv(width, CHANNELS))
        constants = {"NUMBERS": NUMBERS[rule.format.name], "TILE": BLOCK, "CHANNELS": CHANNELS}
        launch = channels_to_payload_kernel[grid]
        sizes = (rows, width, *x_ND.stride())
        launch(
            x_ND,
            payload_B,
            *sizes,
            rule.format.largest,
            rule.power_of_two,
            **constants,
        )
    return payload_B


def launch_payloads_to_channels(
    x_nND: Tensor,
    payload_nB: Tensor,
    format: Fp8Format,
) -> None:
    if x_nND.numel() == 0:
        return
    ranks, rows, width = x_nND.shape
    assert payload_nB.stride(1) == 1, "bytes of a payload lie side by side"
    assert x_nND.is_contiguous(), "rows lie without gaps"
    grid = (blocks_for(rows), triton.cdiv(width, CHANNELS), ranks)
    launch = payloads_to_channels_kernel[grid]
    stride = payload_nB.stride(0)
    launch(
        x_nND,
        payload_nB,
        rows,
        width,
        stride,
        NUMBERS[format.name],
        TILE=BLOCK,
        CHANNELS=CHANNELS,
    )
