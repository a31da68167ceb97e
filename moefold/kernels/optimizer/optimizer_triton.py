"""Triton kernels of the optimizer: passes over flat buckets that read every element once and write it once.

Imported only where Triton is installed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.optimizer.adamw_scalars import AdamWScalars
from moefold.kernels.optimizer.state_blocks import FP8_LARGEST, FP8_SMALLEST, FP16_SMALLEST, STATE_BLOCK
from moefold.kernels.tile_triton import load_or_zero, wide_program_id

BLOCK = 1024  # elements of a program: eight a thread, which is 16 bytes of bf16
BLOCKS_PER_PROGRAM = 16  # blocks of moments: sixteen elements a thread, which is 16 bytes of 8-bit codes
SQUARES_PER_PROGRAM = 16 * BLOCK  # elements of which a program adds up the squares


def scalar_place(name: str, numbers: type[NamedTuple] = AdamWScalars) -> tl.constexpr:
    """The place of a number in the tensor of a step's numbers."""
    place = numbers._fields.index(name)
    return tl.constexpr(place)


STEP_SIZE = scalar_place("step_size")
KEEP = scalar_place("keep")
INVERSE_ROOT = scalar_place("inverse_root")
SEED = scalar_place("seed")
LARGEST_FP8 = tl.constexpr(FP8_LARGEST)
INVERSE_FP8 = tl.constexpr(1 / FP8_LARGEST)
SMALLEST_FP8 = tl.constexpr(FP8_SMALLEST)
SMALLEST_FP16 = tl.constexpr(FP16_SMALLEST)
ROUNDS_TO_WHOLE = tl.constexpr(1.5 * 2**23)  # added to fp32, a small number is rounded to a whole one


@triton.jit
def hashed_bits(x):
    """32 random bits for each index, as `hashed_random_bits` in adamw.py."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def weight_random_bits(x):
    """16 random bits for each index, as `weight_random_bits` in adamw.py."""
    x *= 0x9E3779B1
    x ^= x >> 15
    x *= 0x85EBCA77
    return x >> 16


@triton.jit
def load_fp32(x, i, there):
    """Elements i of x as fp32, zeros where there are none."""
    value = load_or_zero(x + i, there)
    return value.to(tl.float32)


@triton.jit
def load_bits(x, i, there):
    """Elements i of 16-bit integers, as 32-bit integers."""
    value = load_or_zero(x + i, there)
    return value.to(tl.int32)


@triton.jit
def load_scalar(scalars, PLACE: constexpr):
    number = tl.load(scalars + PLACE)
    return number.to(tl.float32)


@triton.jit
def store_rounded(at, x, random_bits, there, STOCHASTIC: constexpr):
    """Store as fp32, or as bf16 rounded stochastically or to nearest (split_fp32.py)."""
    stored: constexpr = at.dtype.element_ty
    if stored == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += random_bits.to(tl.int32) if STOCHASTIC else 0x8000
        upper = bits & -65536
        x = upper.to(tl.float32, bitcast=True)
    tl.store(at, x.to(stored), mask=there)


@triton.jit
def load_main(main, weights, i, there, SPLIT: constexpr):
    """Main weights as fp32. SPLIT: `main` are the lower 16 bits."""
    if SPLIT:
        upper = load_bits(weights, i, there)
        lower = load_bits(main, i, there)
        joined = (upper << 16) + lower
        return joined.to(tl.float32, bitcast=True)
    else:
        return load_fp32(main, i, there)


@triton.jit
def store_main(main, weights, w, number, seed, i, there, SPLIT: constexpr, COPY: constexpr, STOCHASTIC: constexpr):
    """Store updated weights: bf16 rounded to nearest, and the main weights or the bits that bf16 lacks. `main` as
    bf16: rounded to nearest, or STOCHASTIC: by the numbers of the elements."""
    bits = w.to(tl.int32, bitcast=True)
    if COPY:
        nearest = (bits + 0x8000) >> 16
        nearest = nearest.to(tl.int16)
        tl.store(weights + i, nearest, mask=there)
    if SPLIT:
        bits = bits.to(tl.int16)
        tl.store(main + i, bits, mask=there)
    elif main.dtype.element_ty == tl.bfloat16:
        seeded = number ^ seed.to(tl.uint32)
        store_rounded(main + i, w, weight_random_bits(seeded), there, STOCHASTIC)
    else:
        tl.store(main + i, w, mask=there)


@triton.jit
def load_codes(moment, scales, i, block, there, SECOND: constexpr):
    """A moment in codes (state_blocks.py) as fp32: a tile (blocks, elements). `block` are the numbers of the tile's
    blocks, -1 behind the last."""
    kind: constexpr = moment.dtype.element_ty
    scale = load_or_zero(scales + block, block >= 0)
    if kind == tl.int8 or kind == tl.uint8:
        LEVELS: constexpr = 127 if kind == tl.int8 else 255
        value = load_bits(moment, i, there).to(tl.float32)
        square = value * value
        value = square * square if SECOND else square * (value * tl.abs(value))
        scale *= 1 / LEVELS**4
    elif kind == tl.float8e4nv:
        value = tl.load(moment + i, mask=there, other=0.0).to(tl.float32)
        scale *= INVERSE_FP8
    else:
        value = load_fp32(moment, i, there)
    value *= scale[:, None]
    if SECOND:
        value *= value
    return value


@triton.jit
def with_sign_of(magnitude, x):
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    bits = magnitude.to(tl.int32, bitcast=True) | sign
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_moment_kernel(values, codes, scales, n, SECOND: constexpr, BLOCKS: constexpr, BLOCK: constexpr):
    """fp32 values of a moment in codes, in the order of products of `decode_blocks`: the largest of a block is its
    scale to the bit, so that values are encoded as the same codes."""
    block = wide_program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = i < n
    scale = load_or_zero(scales + block, block * BLOCK < n)
    kind: constexpr = codes.dtype.element_ty
    if kind == tl.int8 or kind == tl.uint8:
        INVERSE: constexpr = 1 / 127 if kind == tl.int8 else 1 / 255
        fourth_root = load_bits(codes, i, there).to(tl.float32) * INVERSE
        square = fourth_root * fourth_root
        value = with_sign_of(square * square, fourth_root)
    elif kind == tl.float8e4nv:
        value = tl.load(codes + i, mask=there, other=0.0).to(tl.float32) * INVERSE_FP8
    else:
        value = load_fp32(codes, i, there)
    value *= scale[:, None]
    if SECOND:
        value *= value
    tl.store(values + i, value, mask=there)


@triton.jit
def store_codes(moment, scales, x, i, block, there, SECOND: constexpr):
    """Store the first moment, or the root of the second, as codes with new scales."""
    kind: constexpr = moment.dtype.element_ty
    magnitude = tl.abs(x)
    largest = tl.max(magnitude, 1)
    tl.store(scales + block, largest, mask=block >= 0)
    inverse = 1 / tl.where(largest > 0, largest, 1.0)
    relative = magnitude * inverse[:, None]
    if kind == tl.int8 or kind == tl.uint8:
        LEVELS: constexpr = 127 if kind == tl.int8 else 255
        fourth_root = tl.rsqrt(tl.rsqrt(relative))
        scaled = tl.maximum(fourth_root, 1 / LEVELS) if SECOND else with_sign_of(fourth_root, x)
        rounded = scaled * LEVELS + ROUNDS_TO_WHOLE  # the lowest byte is the code
        code = rounded.to(tl.int32, bitcast=True)
    elif kind == tl.float8e4nv:
        scaled = relative * LARGEST_FP8
        code = tl.maximum(scaled, SMALLEST_FP8) if SECOND else with_sign_of(scaled, x)
    else:
        code = tl.maximum(relative, SMALLEST_FP16) if SECOND else with_sign_of(relative, x)
    tl.store(moment + i, code.to(kind), mask=there)


@triton.jit
def store_main_codes(
    main, scales, weights, w, number, seed, i, block, there, COPY: constexpr, STOCHASTIC: constexpr
):  # fmt: skip
    """Store main weights in codes (state_blocks.py), and the bf16 weights nearest to what the codes hold."""
    kind: constexpr = main.dtype.element_ty
    magnitude = tl.abs(w)
    largest = tl.max(magnitude, 1)
    tl.store(scales + block, largest, mask=block >= 0)
    divisor = tl.where(largest > 0, largest, 1.0)
    relative = magnitude * (1 / divisor)[:, None]
    random_bits = weight_random_bits(number ^ seed.to(tl.uint32)).to(tl.int32)
    if kind == tl.int8:
        held = power_code(relative, random_bits, STOCHASTIC)
        code = with_sign_of(held, w).to(kind)
        square = held * held
        held = square * square * (1 / 127**4)
    elif kind == tl.float8e4nv:
        if STOCHASTIC:
            relative = kept_bits(relative, random_bits << 4, 20)
        code = with_sign_of(relative * LARGEST_FP8, w).to(kind)
        held = tl.abs(code.to(tl.float32)) * INVERSE_FP8
    else:
        if STOCHASTIC:
            relative = kept_bits(relative, random_bits >> 3, 13)
        code = with_sign_of(relative, w).to(kind)
        held = tl.abs(code.to(tl.float32))
    tl.store(main + i, code, mask=there)
    if COPY:
        bits = with_sign_of(held * largest[:, None], w).to(tl.int32, bitcast=True)
        nearest = (bits + 0x8000) >> 16
        tl.store(weights + i, nearest.to(tl.int16), mask=there)


@triton.jit
def kept_bits(x, random_bits, DROPPED: constexpr):
    """fp32 without its last bits, random bits added before."""
    bits = x.to(tl.int32, bitcast=True) + random_bits
    kept = (bits >> DROPPED) << DROPPED
    return kept.to(tl.float32, bitcast=True)


@triton.jit
def power_code(relative, random_bits, STOCHASTIC: constexpr):
    """The magnitudes of int8 codes, as fp32, of magnitudes up to one."""
    scaled = tl.sqrt(tl.sqrt(relative)) * 127
    if STOCHASTIC:
        below = tl.minimum(tl.floor(scaled), 126.0)
        square = below * below
        value_below = square * square
        next_square = (below + 1) * (below + 1)
        step = next_square * next_square - value_below
        share = (random_bits.to(tl.float32) + 0.5) * (1 / 65536)
        is_above = relative * (127.0**4) - value_below > share * step
        code = below + is_above.to(tl.float32)
    else:
        code = (scaled + ROUNDS_TO_WHOLE) - ROUNDS_TO_WHOLE
    return code


@triton.jit
def add_in_blocks_kernel(codes, scales, x, n, ADDS: constexpr, BLOCKS: constexpr, BLOCK: constexpr):
    """Values added to those in codes, or codes of the values."""
    row = wide_program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    i = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = i < n
    block = tl.where(row * BLOCK < n, row, -1)
    total = load_fp32(x, i, there)
    if ADDS:
        total += load_codes(codes, scales, i, block, there, False)
    total = tl.where(total == total, total, float("inf"))  # which a maximum keeps: the scale tells of NaN
    store_codes(codes, scales, total, i, block, there, False)


@triton.jit
def update_elements(
    main,
    gradient,
    mean,
    square,
    weights,
    factor,
    scalars,
    i,
    there,
    first,
    beta1,
    beta2,
    eps,
    SPLIT: constexpr,
    COPY: constexpr,
    STOCHASTIC: constexpr,
    STOCHASTIC_MAIN: constexpr,
    mean_scales=None,
    square_scales=None,
    main_scales=None,
    gradient_scales=None,
    block=None,
):
    """The update of elements i, of any shape. The betas are the new value's share. SPLIT: `main` are the lower 16 bits;
    COPY: bf16 weights lie apart. `main` as bf16: there are no others. STOCHASTIC: bf16 moments are rounded so;
    STOCHASTIC_MAIN: main weights, in bf16 or codes. States with scales: elements i are tiles (blocks, elements)."""
    # the numbers of this step
    lr = load_scalar(scalars, STEP_SIZE)
    keep = load_scalar(scalars, KEEP)
    root = load_scalar(scalars, INVERSE_ROOT)
    seed = tl.load(scalars + SEED).to(tl.int64)
    if main_scales is None:
        w = load_main(main, weights, i, there, SPLIT)
    else:
        w = load_codes(main, main_scales, i, block, there, False)
    # gradient and moments
    if gradient_scales is None:
        g = load_fp32(gradient, i, there)
    else:
        g = load_codes(gradient, gradient_scales, i, block, there, False)
    g *= factor
    if mean_scales is None:
        m = load_fp32(mean, i, there)
    else:
        m = load_codes(mean, mean_scales, i, block, there, False)
    if square_scales is None:
        v = load_fp32(square, i, there)
    else:
        v = load_codes(square, square_scales, i, block, there, True)
    # the update
    m += (g - m) * beta1
    v += (g * g - v) * beta2
    root_of_v = tl.sqrt(v)
    divisor = root_of_v * root + eps
    if block is None:
        move = lr * m / divisor
    else:  # fewer instructions than a division: the pass over 8-bit moments has few bytes to wait for
        inverse_root = tl.rsqrt(divisor)
        move = lr * m * inverse_root * inverse_root
    w = w * keep - move
    # moments back, rounded
    random_bits = i
    number = (i + first).to(tl.uint32)
    if STOCHASTIC:
        seeded = number ^ seed.to(tl.uint32)
        random_bits = hashed_bits(seeded)
    if mean_scales is None:
        store_rounded(mean + i, m, random_bits & 0xFFFF, there, STOCHASTIC)
    else:
        store_codes(mean, mean_scales, m, i, block, there, False)
    if square_scales is None:
        store_rounded(square + i, v, random_bits >> 16, there, STOCHASTIC)
    else:
        store_codes(square, square_scales, root_of_v, i, block, there, True)
    if main_scales is None:
        store_main(main, weights, w, number, seed, i, there, SPLIT, COPY, STOCHASTIC_MAIN)
    else:
        store_main_codes(main, main_scales, weights, w, number, seed, i, block, there, COPY, STOCHASTIC_MAIN)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def adamw_kernel(
    main,
    gradient,
    mean,
    square,
    weights,
    scale,
    scalars,
    n,
    first,
    beta1,
    beta2,
    eps,
    SPLIT: constexpr,
    COPY: constexpr,
    STOCHASTIC: constexpr,
    STOCHASTIC_MAIN: constexpr,
    BLOCK: constexpr,
):
    factor = tl.load(scale).to(tl.float32)
    if is_finite(factor):
        i = wide_program_id(0) * BLOCK + tl.arange(0, BLOCK)
        update_elements(
            main,
            gradient,
            mean,
            square,
            weights,
            factor,
            scalars,
            i,
            i < n,
            first,
            beta1,
            beta2,
            eps,
            SPLIT,
            COPY,
            STOCHASTIC,
            STOCHASTIC_MAIN,
        )


@triton.jit
def adamw_in_blocks_kernel(
    main,
    gradient,
    mean,
    square,
    weights,
    scale,
    scalars,
    n,
    first,
    mean_scales,
    square_scales,
    main_scales,
    gradient_scales,
    beta1,
    beta2,
    eps,
    SPLIT: constexpr,
    COPY: constexpr,
    STOCHASTIC: constexpr,
    STOCHASTIC_MAIN: constexpr,
    BLOCKS: constexpr,
    BLOCK: constexpr,
):
    """The update with states in blocks: a program takes a few blocks, a row of the tile each."""
    factor = tl.load(scale).to(tl.float32)
    if is_finite(factor):
        row = wide_program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        i = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        block = tl.where(row * BLOCK < n, row, -1)
        update_elements(
            main,
            gradient,
            mean,
            square,
            weights,
            factor,
            scalars,
            i,
            i < n,
            first,
            beta1,
            beta2,
            eps,
            SPLIT,
            COPY,
            STOCHASTIC,
            STOCHASTIC_MAIN,
            mean_scales,
            square_scales,
            main_scales,
            gradient_scales,
            block,
        )


@triton.jit
def sum_squares_kernel(x, parts, n, SQUARES: constexpr, BLOCK: constexpr):
    """The sum of the squares of this program's elements: fp32 by lane, then over lanes."""
    p = tl.program_id(0)
    begin = p.to(tl.int64) * SQUARES
    first = begin + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(SQUARES // BLOCK):
        i = first + step * BLOCK
        value = load_fp32(x, i, i < n)
        total += value * value
    sum_of_lanes = tl.sum(total, 0)
    tl.store(parts + p, sum_of_lanes.to(tl.float64))


def launch_adamw(main, g, m, v, weights, scale, scalars, options, first, *scales) -> None:
    """Weights are bf16, or None where there are none beside `main`; scales are those of m, v, main and g, or None. See
    adamw.py."""
    n = len(main)
    state = (main, g, m, v, weight_bits(main, weights))
    numbers = numbers_of_options(options)
    modes = modes_of_state(main, weights, options)
    if not any(scale is not None for scale in scales):
        programs = triton.cdiv(n, BLOCK)
        adamw_kernel[(programs,)](*state, scale, scalars, n, first, *numbers, **modes, BLOCK=BLOCK)
        return
    tile = {"BLOCKS": BLOCKS_PER_PROGRAM, "BLOCK": STATE_BLOCK}
    programs = triton.cdiv(n, BLOCKS_PER_PROGRAM * STATE_BLOCK)
    adamw_in_blocks_kernel[(programs,)](*state, scale, scalars, n, first, *scales, *numbers, **modes, **tile)


def weight_bits(main, weights) -> Tensor:
    """bf16 weights as integers; where there are none, a tensor that is not read."""
    return main if weights is None else weights.view(torch.int16)


def numbers_of_options(options) -> tuple[float, float, float]:
    return 1 - options.beta1, 1 - options.beta2, options.eps


def modes_of_state(main, weights, options) -> dict[str, bool]:
    split = main.dtype == torch.int16
    rounding = {"STOCHASTIC": options.stochastic, "STOCHASTIC_MAIN": options.stochastic_main}
    return {"SPLIT": split, "COPY": weights is not None} | rounding


def launch_decode_moment(values: Tensor, codes: Tensor, scales: Tensor, is_second: bool) -> None:
    n = len(codes)
    programs = triton.cdiv(n, BLOCKS_PER_PROGRAM * STATE_BLOCK)
    if programs:
        decode_moment_kernel[(programs,)](values, codes, scales, n, is_second, BLOCKS_PER_PROGRAM, STATE_BLOCK)


def launch_add_in_blocks(codes: Tensor, scales: Tensor, x: Tensor, adds: bool) -> None:
    n = len(x)
    programs = triton.cdiv(n, BLOCKS_PER_PROGRAM * STATE_BLOCK)
    if programs:
        add_in_blocks_kernel[(programs,)](codes, scales, x, n, adds, BLOCKS_PER_PROGRAM, STATE_BLOCK)


def launch_add_squares(total: Tensor, *flats: Tensor) -> None:
    """Each program stores its sum; the sums of all tensors are then added in fp64, in the same order every time."""
    programs = [triton.cdiv(len(x), SQUARES_PER_PROGRAM) for x in flats]
    parts = total.new_empty(sum(programs), dtype=torch.float64)
    for x, mine in zip(flats, parts.split(programs), strict=True):
        if len(mine):
            sum_squares_kernel[(len(mine),)](x, mine, len(x), SQUARES_PER_PROGRAM, BLOCK)
    total += parts.sum()
