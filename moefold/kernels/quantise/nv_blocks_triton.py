"""NVFP4 in Triton (rule: nvfp4.py). Imported only where Triton is.

Each step is one fp32 or integer instruction, as in the reference, so that codes and scales are the same bits. Random
numbers are those of counter_random.py, hashed in the kernel.
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
from moefold.kernels.quantise.fp8 import E4M3
from moefold.kernels.quantise.fp8_triton import load_scales, magnitude_bits, magnitude_of_bits
from moefold.kernels.quantise.nvfp4 import Nvfp4, encode_scale
from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, program_block
from moefold.layout.counter_random import RandomCounters

E4M3_LARGEST = constexpr(E4M3.largest)
LARGEST = constexpr(nvfp4.E2M1_LARGEST)
SIXTH = constexpr(1.0 / nvfp4.E2M1_LARGEST)
LARGEST_FP32 = constexpr(nvfp4.LARGEST_FP32)
LARGEST_CODE = constexpr(nvfp4.LARGEST_CODE)
SIGN_CODE = constexpr(nvfp4.SIGN_CODE)
MAGNITUDE_CODES = constexpr(nvfp4.LARGEST_CODE)  # as a mask
RANDOM_BITS = constexpr(nvfp4.RANDOM_BITS)
ONE_RANDOM_BIT = constexpr(2.0**-nvfp4.RANDOM_BITS)
FROM_SMALLEST = constexpr(2.0**126)  # times which fp32 numbers with the bits of E2M1 at the top are its values
WHOLE_FROM = constexpr(1.5 * 2.0**23)  # fp32 numbers from here on are whole: adding it rounds, ties to even


@triton.jit
def at_most(x, most: constexpr):
    """NaN stays."""
    return tl.minimum(x, most, tl.PropagateNan.ALL)


@triton.jit
def hash_64(x):
    """The finaliser of splitmix64 of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_chances(counter):
    """Numbers in [0, 1) of counters, int64, as the reference has them."""
    drawn = hash_64(counter.to(tl.uint64, bitcast=True))
    bits = (drawn >> (64 - RANDOM_BITS)).to(tl.int32)
    return bits.to(tl.float32) * ONE_RANDOM_BIT


@triton.jit
def e2m1_steps(magnitude, from_2, from_4, chance, RANDOM: constexpr):
    """Magnitudes up to 6, rounded, in whole steps of E2M1: half a unit, one from 2 on, two from 4 on. Sums alone: a GPU
    has few units for conversions."""
    steps = tl.where(from_4, magnitude * 0.5, tl.where(from_2, magnitude, magnitude * 2))
    shifted = steps + WHOLE_FROM
    nearest = shifted - WHOLE_FROM
    if RANDOM:
        below = tl.where(nearest > steps, nearest - 1, nearest)
        return tl.where(chance < steps - below, below + 1, below)
    else:
        return nearest


@triton.jit
def e2m1_codes(x, chance, RANDOM: constexpr):
    """Codes of 4 bits as int32."""
    magnitude = at_most(tl.abs(x), LARGEST)
    from_2 = magnitude >= 2
    from_4 = magnitude >= 4
    whole = e2m1_steps(magnitude, from_2, from_4, chance, RANDOM)
    # 2 has the code 4, 4 the code 6
    number = whole + tl.where(from_4, 4.0, tl.where(from_2, 2.0, 0.0))
    lowest_bits = (number + WHOLE_FROM).to(tl.int32, bitcast=True)
    code = tl.where(x == x, lowest_bits & MAGNITUDE_CODES, LARGEST_CODE)
    sign = x.to(tl.uint32, bitcast=True) >> 28
    return code | (sign.to(tl.int32) & SIGN_CODE)


@triton.jit
def e2m1_rounded(x, chance, RANDOM: constexpr):
    """The values of these codes."""
    magnitude = at_most(tl.abs(x), LARGEST)
    from_2 = magnitude >= 2
    from_4 = magnitude >= 4
    whole = e2m1_steps(magnitude, from_2, from_4, chance, RANDOM)
    value = whole * tl.where(from_4, 2.0, tl.where(from_2, 1.0, 0.5))
    value = tl.where(x == x, value, LARGEST)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return magnitude_of_bits(magnitude_bits(value) | sign)


@triton.jit
def block_scales(bits, encode):
    """E4M3 scales of blocks from the bits of their largest magnitudes."""
    amax = magnitude_of_bits(bits)
    scale = amax * (encode * SIXTH)
    return at_most(scale, E4M3_LARGEST).to(tl.float8e4nv)


@triton.jit
def block_factors(scale, encode):
    """What the values of blocks are multiplied by."""
    decode = tl.div_rn(1.0, encode)
    decoded = scale.to(tl.float32) * decode
    return at_most(tl.div_rn(1.0, decoded), LARGEST_FP32)


@triton.jit
def quantise_nv_kernel(
    source,
    encodes,
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
    encode_at = encodes + a * encode_a + i * HEIGHT * encode_m
    encode = load_scales(encode_at, i < tall)[:, None]
    blocks = in_blocks(x, TILE_M, TILE_N, HEIGHT, BLOCK)
    scale = block_scales(largest_bits(blocks), encode)
    if not EXACT:
        scale_at = flat_tile(scales, a, i, j, tall, wide)
        tl.store(scale_at, scale, mask=inside_tile(i, j, tall, wide))
    # codes
    factor = block_factors(scale, encode)
    scaled = blocks * factor[:, None, :, None]
    shape: constexpr = (TILE_M, TILE_N)
    y = tl.reshape(scaled, shape)
    chance = 0.0
    if RANDOM == "lines":
        row = load_or_zero(rows + m, m < M)
        column = load_or_zero(columns + n, n < N)
        chance = random_chances(row[:, None] + column[None, :])
    if RANDOM == "matrices":
        first = load_or_zero(columns + m * N, m < M)
        chance = random_chances(tl.load(rows + a) + first[:, None] + n[None, :])
    if EXACT:
        values = in_blocks(e2m1_rounded(y, chance, RANDOM is not None), TILE_M, TILE_N, HEIGHT, BLOCK)
        exact = tl.reshape(values * scale.to(tl.float32)[:, None, :, None], shape)
        out = flat_tile(packed, a, m, n, M, N)
        tl.store(out, exact.to(packed.dtype.element_ty), mask=inside_tile(m, n, M, N))
        return
    codes = e2m1_codes(y, chance, RANDOM is not None)
    pairs: constexpr = (TILE_M, TILE_N // 2, 2)
    low, high = tl.split(tl.reshape(codes, pairs))
    byte = (low | (high << 4)).to(tl.uint8)
    half = N // 2
    c = program_block(1, TILE_N // 2)
    tl.store(flat_tile(packed, a, m, c, M, half), byte, mask=inside_tile(m, c, M, half))


@triton.jit
def e2m1_values(code):
    """Values of codes, int32: sign, two bits of exponent and one digit are put where fp32 has its sign, the lowest bits
    of its exponent, and its first digit."""
    magnitude = (code & MAGNITUDE_CODES) << 22
    sign = (code & SIGN_CODE) << 28
    return magnitude_of_bits(magnitude | sign) * FROM_SMALLEST


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
    half = N // 2
    c = program_block(1, TILE_N // 2)
    byte = load_or_zero(flat_tile(packed, a, m, c, M, half), inside_tile(m, c, M, half)).to(tl.int32)
    codes = tl.join(byte & 15, byte >> 4)
    values = in_blocks(e2m1_values(codes), TILE_M, TILE_N, HEIGHT, BLOCK)
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


def launch_quantise_nv(x: Tensor, amax: Tensor, random: RandomCounters | None, squares: bool) -> Nvfp4:
    *rest, lines, width = x.shape
    height = NV_BLOCK if squares else 1
    encode = encode_scale(amax.float())
    packed = x.new_empty((*rest, lines, width // 2), dtype=torch.uint8)
    scales_shape = (*rest, lines // height, width // NV_BLOCK)
    scales = x.new_empty(scales_shape, dtype=E4M3.dtype)
    launch_over_tiles(x, encode, random, packed, scales, height)
    return Nvfp4(packed, scales, encode)


def launch_round_nv(x: Tensor, amax: Tensor, dtype: torch.dtype, random: RandomCounters | None) -> Tensor:
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
    tensors = (x, encode, rows, columns, out, scales)
    strides = (*matrices.strides, *of_lines.strides[:2])
    launch = quantise_nv_kernel[plan.grid]
    launch(*tensors, lines, width, *strides, RANDOM=by, EXACT=scales is None, **plan.constants)


def launch_dequantise_nv(packed: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    *rest, lines, bytes_of_line = packed.shape
    width = 2 * bytes_of_line
    if transposed:
        out = packed.new_empty((*rest, width, lines), dtype=dtype).mT
    else:
        out = packed.new_empty((*rest, lines, width), dtype=dtype)
    if packed.numel():
        packed = packed.contiguous()
        scales = scales.contiguous()
        height = lines // scales.shape[-2]
        matrices = as_matrices(out)
        plan = plan_tiles(matrices, NV_BLOCK, height)
        launch = dequantise_nv_kernel[plan.grid]
        launch(packed, scales, out, lines, width, *matrices.strides, **plan.constants)
    return out
