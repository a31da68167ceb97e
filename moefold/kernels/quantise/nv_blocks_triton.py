"""NVFP4 in Triton (rule: nvfp4.py). Imported only where Triton is.

Each step is one fp32 or integer instruction, as in the reference, so that codes and scales are the same bits. Random
numbers are those of counter_random.py, hashed in the kernel. Codes are read and written eight at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.config.precision_recipes import NV_BLOCK
from moefold.kernels.quantise import nvfp4
from moefold.kernels.quantise.block_tiles_triton import (
    as_matrices,
    block_numbers,
    flat_tile,
    in_blocks,
    inside_tile,
    largest_bits,
    matrix_and_lines,
    plan_tiles,
    strided_tile,
)
from moefold.kernels.quantise.e2m1_triton import (
    GROUP,
    WORD,
    dither_of_groups,
    e2m1_codes,
    e2m1_values,
    packed_words,
    unpacked_values,
)
from moefold.kernels.quantise.fp8 import E4M3
from moefold.kernels.quantise.fp8_triton import load_scales, magnitude_of_bits
from moefold.kernels.quantise.nvfp4 import Nvfp4, encode_scale
from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, program_block
from moefold.layout.counter_random import RandomCounters

E4M3_LARGEST = constexpr(E4M3.largest)
SIXTH = constexpr(1.0 / nvfp4.E2M1_LARGEST)
LARGEST_FP32 = constexpr(nvfp4.LARGEST_FP32)
WARPS_BACK = 2  # threads with twice the values need fewer instructions for each


@triton.jit
def at_most(x, most: constexpr):
    """NaN stays."""
    return tl.minimum(x, most, tl.PropagateNan.ALL)


@triton.jit
def block_scales(bits, encode):
    """E4M3 scales of blocks from the bits of their largest magnitudes."""
    amax = magnitude_of_bits(bits)
    scale = amax * (encode * SIXTH)
    return at_most(scale, E4M3_LARGEST).to(tl.float8e4nv)


@triton.jit
def block_factors(scale, decode):
    """What the values of blocks are multiplied by."""
    decoded = scale.to(tl.float32) * decode
    return at_most(tl.div_rn(1.0, decoded), LARGEST_FP32)


@triton.jit
def quantise_nv_kernel(
    source,
    encodes,
    decodes,
    rows,
    columns,
    packed,
    scales,
    M,
    N,
    stride_a,
    stride_m,
    stride_n,
    encode_a,
    encode_m,
    RANDOM: constexpr,
    EXACT: constexpr,
    HEIGHT: constexpr,
    BLOCK: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    """RANDOM: None, "lines" (a random row for each line) or "matrices" (one for each matrix). EXACT: `packed` gets
    values times scales."""
    a, m = matrix_and_lines(M, TILE_M)
    n = program_block(1, TILE_N)
    at = strided_tile(source, a, m, n, stride_a, stride_m, stride_n)
    x = load_as_fp32(at, inside_tile(m, n, M, N))
    # scales
    i, j = block_numbers(m, n, HEIGHT, BLOCK, TILE_M, TILE_N)
    tall = M // HEIGHT
    wide = N // BLOCK
    number_of_line = a * encode_a + i * HEIGHT * encode_m
    encode = load_scales(encodes + number_of_line, i < tall)[:, None]
    decode = load_scales(decodes + number_of_line, i < tall)[:, None]
    blocks = in_blocks(x, TILE_M, TILE_N, HEIGHT, BLOCK)
    scale = block_scales(largest_bits(blocks), encode)
    if not EXACT:
        scale_at = flat_tile(scales, a, i, j, tall, wide)
        tl.store(scale_at, scale, mask=inside_tile(i, j, tall, wide))
    # codes
    factor = block_factors(scale, decode)
    scaled = blocks * factor[:, None, :, None]
    shape: constexpr = (TILE_M, TILE_N)
    y = tl.reshape(scaled, shape)
    dither = 0
    if RANDOM is not None:
        g = program_block(1, TILE_N // GROUP)
        if RANDOM == "lines":
            row = load_or_zero(rows + m, m < M)[:, None]
            first = load_or_zero(columns + g * GROUP, g * GROUP < N)
            group = (first.to(tl.uint32) // GROUP)[None, :]
        else:
            row = tl.load(rows + a)
            first = load_or_zero(columns + m * N, m < M)
            group = (first.to(tl.uint32) // GROUP)[:, None] + g[None, :]
        dither = dither_of_groups(row, group, TILE_M, TILE_N)
    if EXACT:
        values = in_blocks(e2m1_values(y, dither, RANDOM is not None), TILE_M, TILE_N, HEIGHT, BLOCK)
        exact = tl.reshape(values * scale.to(tl.float32)[:, None, :, None], shape)
        out = flat_tile(packed, a, m, n, M, N)
        tl.store(out, exact.to(packed.dtype.element_ty), mask=inside_tile(m, n, M, N))
        return
    codes = e2m1_codes(y, dither, RANDOM is not None)
    words = N // WORD
    w = program_block(1, TILE_N // WORD)
    word = packed_words(codes, TILE_M, TILE_N)
    tl.store(flat_tile(packed, a, m, w, M, words), word, mask=inside_tile(m, w, M, words))


@triton.jit
def dequantise_nv_kernel(
    packed,
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
    words = N // WORD
    w = program_block(1, TILE_N // WORD)
    word = load_or_zero(flat_tile(packed, a, m, w, M, words), inside_tile(m, w, M, words))
    values = in_blocks(unpacked_values(word, TILE_M, TILE_N), TILE_M, TILE_N, HEIGHT, BLOCK)
    # scales
    i, j = block_numbers(m, n, HEIGHT, BLOCK, TILE_M, TILE_N)
    tall = M // HEIGHT
    wide = N // BLOCK
    scale_at = flat_tile(scales, a, i, j, tall, wide)
    scale = tl.load(scale_at, mask=inside_tile(i, j, tall, wide), other=0.0).to(tl.float32)
    exact = values * scale[:, None, :, None]
    shape: constexpr = (TILE_M, TILE_N)
    x = tl.reshape(exact, shape)
    at = strided_tile(out, a, m, n, stride_a, stride_m, stride_n)
    tl.store(at, x.to(out.dtype.element_ty), mask=inside_tile(m, n, M, N))


def launch_quantise_nv(
    x: Tensor,
    amax: Tensor,
    random: RandomCounters | None,
    squares: bool,
) -> Nvfp4:
    *rest, lines, width = x.shape
    height = NV_BLOCK if squares else 1
    encode = encode_scale(amax.float())
    packed = x.new_empty((*rest, lines, width // 2), dtype=torch.uint8)
    scales_shape = (*rest, lines // height, width // NV_BLOCK)
    scales = x.new_empty(scales_shape, dtype=E4M3.dtype)
    launch_over_tiles(x, encode, random, packed.view(torch.int32), scales, height)
    return Nvfp4(packed, scales, encode)


def launch_round_nv(
    x: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    random: RandomCounters | None,
) -> Tensor:
    encode = encode_scale(amax.float())
    values = x.new_empty(x.shape, dtype=dtype)
    launch_over_tiles(x, encode, random, values, None, 1)
    return values


def launch_over_tiles(
    x: Tensor,
    encode: Tensor,
    random: RandomCounters | None,
    out: Tensor,
    scales: Tensor | None,
    height: int,
) -> None:
    """Without `scales`, `out` gets values times scales."""
    *rest, lines, width = x.shape
    if x.numel() == 0:
        return
    matrices = as_matrices(x)
    of_lines = as_matrices(encode.expand(*rest, lines, 1))
    plan = plan_tiles(matrices, NV_BLOCK, height)
    rows, columns = (None, None) if random is None else random
    by = None if random is None else "matrices" if rest else "lines"
    tensors = (x, encode, encode.reciprocal(), rows, columns, out, scales)
    strides = (*matrices.strides, *of_lines.strides[:2])
    launch = quantise_nv_kernel[plan.grid]
    launch(
        *tensors,
        lines,
        width,
        *strides,
        RANDOM=by,
        EXACT=scales is None,
        **plan.constants,
    )


def launch_dequantise_nv(
    packed: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    *rest, lines, bytes_of_line = packed.shape
    width = 2 * bytes_of_line
    if transposed:
        out = packed.new_empty((*rest, width, lines), dtype=dtype).mT
    else:
        out = packed.new_empty((*rest, lines, width), dtype=dtype)
    if packed.numel():
        packed = packed.contiguous().view(torch.int32)
        scales = scales.contiguous()
        height = lines // scales.shape[-2]
        matrices = as_matrices(out)
        plan = plan_tiles(matrices, NV_BLOCK, height)
        launch = dequantise_nv_kernel[plan.grid]
        sizes = (lines, width, *matrices.strides)
        launch(
            packed,
            scales,
            out,
            *sizes,
            **plan.constants,
            num_warps=WARPS_BACK,
        )
    return out
