"""Triton kernels of the optimizer: passes over flat buckets that read every element once and write it once.

Imported only where Triton is installed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.optimizer.adamw_scalars import AdamWScalars
from moefold.kernels.tile_triton import load_or_zero, wide_program_id

BLOCK = 1024  # elements of a program: eight a thread, which is 16 bytes of bf16
SQUARES_PER_PROGRAM = 16 * BLOCK  # elements of which a program adds up the squares


def scalar_place(name: str) -> tl.constexpr:
    """The place of a number in the tensor of a step's numbers, as AdamWScalars has them."""
    place = AdamWScalars._fields.index(name)
    return tl.constexpr(place)


STEP_SIZE = scalar_place("step_size")
KEEP = scalar_place("keep")
INVERSE_ROOT = scalar_place("inverse_root")
SEED = scalar_place("seed")


@triton.jit
def hashed_bits(x):
    """32 random bits for each index, as `hashed_random_bits` in adamw.py."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


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
def update_elements(
    main, gradient, mean, square, weights, factor, scalars, i, there, first,
    beta1, beta2, eps,
    SPLIT: constexpr, COPY: constexpr, STOCHASTIC: constexpr,
):  # fmt: skip
    """The update of elements i, of any shape. The betas are the new value's share. SPLIT: `main` are the lower 16 bits;
    COPY: bf16 weights lie apart."""
    # the numbers of this step
    lr = load_scalar(scalars, STEP_SIZE)
    keep = load_scalar(scalars, KEEP)
    root = load_scalar(scalars, INVERSE_ROOT)
    seed = tl.load(scalars + SEED).to(tl.int64)
    # main weights
    if SPLIT:
        upper = load_bits(weights, i, there)
        lower = load_bits(main, i, there)
        joined = (upper << 16) + lower
        w = joined.to(tl.float32, bitcast=True)
    else:
        w = load_or_zero(main + i, there)
    # gradient and moments
    g = load_fp32(gradient, i, there) * factor
    m = load_fp32(mean, i, there)
    v = load_fp32(square, i, there)
    # the update
    m += (g - m) * beta1
    v += (g * g - v) * beta2
    divisor = tl.sqrt(v) * root + eps
    w = w * keep - lr * m / divisor
    # moments back, rounded
    random_bits = i
    if STOCHASTIC:
        number = i + first
        seeded = number.to(tl.uint32) ^ seed.to(tl.uint32)
        random_bits = hashed_bits(seeded)
    store_rounded(mean + i, m, random_bits & 0xFFFF, there, STOCHASTIC)
    store_rounded(square + i, v, random_bits >> 16, there, STOCHASTIC)
    # weights back: bf16 rounded to nearest, and the main weights or the bits that bf16 lacks
    bits = w.to(tl.int32, bitcast=True)
    if COPY:
        nearest = (bits + 0x8000) >> 16
        nearest = nearest.to(tl.int16)
        tl.store(weights + i, nearest, mask=there)
    if SPLIT:
        bits = bits.to(tl.int16)
        tl.store(main + i, bits, mask=there)
    else:
        tl.store(main + i, w, mask=there)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def adamw_kernel(
    main, gradient, mean, square, weights, scale, scalars, n, first,
    beta1, beta2, eps,
    SPLIT: constexpr, COPY: constexpr, STOCHASTIC: constexpr, BLOCK: constexpr,
):  # fmt: skip
    factor = tl.load(scale).to(tl.float32)
    if is_finite(factor):
        i = wide_program_id(0) * BLOCK + tl.arange(0, BLOCK)
        update_elements(
            main, gradient, mean, square, weights, factor, scalars, i, i < n, first,
            beta1, beta2, eps, SPLIT, COPY, STOCHASTIC,
        )  # fmt: skip


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


def launch_adamw(main, g, m, v, weights, scale, scalars, options, first=0) -> None:
    """Weights are bf16, or None where there are none beside `main`; see adamw.py."""
    n = len(main)
    blocks = triton.cdiv(n, BLOCK)
    state = (main, g, m, v, weight_bits(main, weights))
    numbers = numbers_of_options(options)
    modes = modes_of_state(main, weights, options)
    adamw_kernel[(blocks,)](*state, scale, scalars, n, first, *numbers, **modes, BLOCK=BLOCK)


def weight_bits(main, weights) -> Tensor:
    """bf16 weights as integers; where there are none, a tensor that is not read."""
    return main if weights is None else weights.view(torch.int16)


def numbers_of_options(options) -> tuple[float, float, float]:
    return 1 - options.beta1, 1 - options.beta2, options.eps


def modes_of_state(main, weights, options) -> dict[str, bool]:
    split = main.dtype == torch.int16
    return {"SPLIT": split, "COPY": weights is not None, "STOCHASTIC": options.stochastic}


def launch_add_squares(total: Tensor, *flats: Tensor) -> None:
    """Each program stores its sum; the sums of all tensors are then added in fp64, in the same order every time."""
    programs = [triton.cdiv(len(x), SQUARES_PER_PROGRAM) for x in flats]
    parts = total.new_empty(sum(programs), dtype=torch.float64)
    for x, mine in zip(flats, parts.split(programs), strict=True):
        if len(mine):
            sum_squares_kernel[(len(mine),)](x, mine, len(x), SQUARES_PER_PROGRAM, BLOCK)
    total += parts.sum()
