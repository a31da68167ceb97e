"""MXFP8 in Triton (rule: mxfp8.py). Imported only where Triton is.

Each step is one fp32 or integer instruction, as in the reference, so that bytes and scales are the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.config.precision_recipes import MX_BLOCK
from moefold.kernels.quantise import mxfp8
from moefold.kernels.quantise.block_tiles_triton import (
    as_matrices,
    as_row_blocks,
    block_numbers,
    flat_tile,
    in_blocks,
    inside_tile,
    largest_bits,
    load_tile,
    matrix_and_lines,
    plan_tiles,
    strided_tile,
)
from moefold.kernels.quantise.fp8 import E4M3, Quantised
from moefold.kernels.quantise.fp8_triton import INFINITY_BITS, MANTISSA, magnitude_bits, magnitude_of_bits
from moefold.kernels.tile_triton import load_or_zero, program_block

LARGEST = constexpr(E4M3.largest)
ONE_OVER_LARGEST = constexpr(1.0 / E4M3.largest)
MANTISSA_BITS = constexpr(mxfp8.MANTISSA_BITS)
NAN_SCALE = constexpr(mxfp8.NAN_SCALE)
TWICE_BIAS = constexpr(2 * mxfp8.BIAS)
LARGEST_EXPONENT = constexpr(mxfp8.LARGEST_EXPONENT)
HALF_OF_SMALLEST_NORMAL = constexpr(mxfp8.HALF_OF_SMALLEST_NORMAL)


@triton.jit
def scale_byte(bits, UP: constexpr):
    """The scale's byte as int32, from the bits of the largest magnitude."""
    if UP:
        scaled = magnitude_of_bits(bits) * ONE_OVER_LARGEST
        scaled_bits = magnitude_bits(scaled)
        exponent = scaled_bits >> MANTISSA_BITS
        of_power = tl.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, 0)
        is_above = (scaled_bits & MANTISSA) > of_power
        byte = exponent + is_above.to(tl.int32)
    else:
        exponent = bits >> MANTISSA_BITS
        byte = tl.maximum(exponent - LARGEST_EXPONENT, 0)
    return tl.where(bits < INFINITY_BITS, byte, NAN_SCALE)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) of int32; NaN for 255."""
    bits = exponent << MANTISSA_BITS
    bits = tl.where(exponent == 0, HALF_OF_SMALLEST_NORMAL, bits)
    value = magnitude_of_bits(bits)
    return tl.where(exponent == NAN_SCALE, float("nan"), value)


@triton.jit
def quantise_mx_kernel(
    source,
    places,
    values,
    scales,
    M,
    N,
    stride_a,
    stride_m,
    stride_n,
    UP: constexpr,
    HEIGHT: constexpr,
    BLOCK: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    a, m = matrix_and_lines(M, TILE_M)
    n = program_block(1, TILE_N)
    x = load_tile(source, places, a, m, n, M, N, stride_a, stride_m, stride_n)
    # scales
    blocks = in_blocks(x, TILE_M, TILE_N, HEIGHT, BLOCK)
    byte = scale_byte(largest_bits(blocks), UP)
    i, j = block_numbers(m, n, HEIGHT, BLOCK, TILE_M, TILE_N)
    tall = M // HEIGHT
    wide = N // BLOCK
    scale_at = flat_tile(scales, a, i, j, tall, wide)
    has_scale = inside_tile(i, j, tall, wide)
    tl.store(scale_at, byte.to(tl.uint8), mask=has_scale)
    # values
    is_nan = byte == NAN_SCALE
    inverse = tl.where(is_nan, NAN_SCALE, TWICE_BIAS - byte)
    scaled = blocks * power_of_two(inverse)[:, None, :, None]
    clamped = tl.clamp(scaled, -LARGEST, LARGEST)
    sound = tl.where(is_nan[:, None, :, None], float("nan"), clamped)
    shape: constexpr = (TILE_M, TILE_N)
    q = tl.reshape(sound, shape).to(tl.float8e4nv)
    tl.store(flat_tile(values, a, m, n, M, N), q, mask=inside_tile(m, n, M, N))


@triton.jit
def dequantise_mx_kernel(
    values,
    scales,
    out,
    M,
    N,
    stride_a,
    stride_m,
    stride_n,
    HEIGHT: constexpr,
    BLOCK: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    a, m = matrix_and_lines(M, TILE_M)
    n = program_block(1, TILE_N)
    inside = inside_tile(m, n, M, N)
    q = tl.load(flat_tile(values, a, m, n, M, N), mask=inside, other=0.0)
    i, j = block_numbers(m, n, HEIGHT, BLOCK, TILE_M, TILE_N)
    tall = M // HEIGHT
    wide = N // BLOCK
    scale_at = flat_tile(scales, a, i, j, tall, wide)
    byte = load_or_zero(scale_at, inside_tile(i, j, tall, wide))
    factor = power_of_two(byte.to(tl.int32))
    blocks = in_blocks(q.to(tl.float32), TILE_M, TILE_N, HEIGHT, BLOCK)
    exact = blocks * factor[:, None, :, None]
    shape: constexpr = (TILE_M, TILE_N)
    x = tl.reshape(exact, shape)
    at = strided_tile(out, a, m, n, stride_a, stride_m, stride_n)
    tl.store(at, x.to(out.dtype.element_ty), mask=inside)


def launch_quantise_mx(
    x: Tensor, rounding: mxfp8.ScaleRounding, squares: bool, places_P: Tensor | None = None
) -> Quantised:
    height = MX_BLOCK if squares else 1
    matrices = as_matrices(x) if places_P is None else as_row_blocks(x, places_P, MX_BLOCK)
    shape = x.shape if places_P is None else matrices.shape
    *rest, lines, width = shape
    values = x.new_empty(shape, dtype=E4M3.dtype)
    scales_shape = (*rest, lines // height, width // MX_BLOCK)
    scales = x.new_empty(scales_shape, dtype=torch.uint8)
    if values.numel():
        plan = plan_tiles(matrices, MX_BLOCK, height)
        launch = quantise_mx_kernel[plan.grid]
        launch(x, places_P, values, scales, lines, width, *matrices.strides, UP=rounding == "up", **plan.constants)
    return Quantised(values, scales)


def launch_dequantise_mx(values: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    *rest, lines, width = values.shape
    if transposed:
        out = values.new_empty((*rest, width, lines), dtype=dtype).mT
    else:
        out = values.new_empty(values.shape, dtype=dtype)
    if values.numel():
        values = values.contiguous()
        scales = scales.contiguous()
        height = lines // scales.shape[-2]
        matrices = as_matrices(out)
        plan = plan_tiles(matrices, MX_BLOCK, height)
        launch = dequantise_mx_kernel[plan.grid]
        launch(values, scales, out, lines, width, *matrices.strides, **plan.constants)
    return out
