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

from moefold.kernels.optimizer.adamw_scalars import AdamWScalars

BLOCK = 1024  # elements of a program: eight a thread, which is 16 bytes of bf16
SQUARES_PER_PROGRAM = 16 * BLOCK  # elements of which a program adds up the squares

# Places in the tensor of a step's numbers, as AdamWScalars has them
STEP_SIZE = tl.constexpr(AdamWScalars._fields.index("step_size"))
KEEP = tl.constexpr(AdamWScalars._fields.index("keep"))
INVERSE_ROOT = tl.constexpr(AdamWScalars._fields.index("inverse_root"))
SEED = tl.constexpr(AdamWScalars._fields.index("seed"))


@triton.jit
def hashed_bits(x):
    """32 random bits for each index, as `hashed_random_bits` in adamw.py."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def store_rounded(at, x, random_bits, there, STOCHASTIC: tl.constexpr):
    """Store as fp32, or as bf16 rounded stochastically or to nearest (split_fp32.py)."""
    if at.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True) + (random_bits.to(tl.int32) if STOCHASTIC else 0x8000)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(at, x.to(at.dtype.element_ty), mask=there)


@triton.jit
def adamw_kernel(
    main, gradient, mean, square, weights, scale, scalars, n,
    beta1, beta2, eps,
    SPLIT: tl.constexpr, COPY: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The betas are the new value's share. SPLIT: `main` are the lower 16 bits; COPY: bf16 weights lie apart."""
    factor = tl.load(scale).to(tl.float32)
    if tl.abs(factor) < float("inf"):  # neither infinite nor NaN
        # The numbers of this step
        lr = tl.load(scalars + STEP_SIZE).to(tl.float32)
        keep = tl.load(scalars + KEEP).to(tl.float32)
        root = tl.load(scalars + INVERSE_ROOT).to(tl.float32)
        seed = tl.load(scalars + SEED).to(tl.int64)
        # Main weights, gradient and moments of this program's block
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = i < n
        if SPLIT:
            upper = tl.load(weights + i, mask=there, other=0).to(tl.int32)
            lower = tl.load(main + i, mask=there, other=0).to(tl.int32)
            w = ((upper << 16) + lower).to(tl.float32, bitcast=True)
        else:
            w = tl.load(main + i, mask=there, other=0.0)
        g = tl.load(gradient + i, mask=there, other=0.0).to(tl.float32) * factor
        m = tl.load(mean + i, mask=there, other=0.0).to(tl.float32)
        v = tl.load(square + i, mask=there, other=0.0).to(tl.float32)
        # The update
        m += (g - m) * beta1
        v += (g * g - v) * beta2
        w = w * keep - lr * m / (tl.sqrt(v) * root + eps)
        # Everything back, rounded
        random_bits = hashed_bits(i.to(tl.uint32) ^ seed.to(tl.uint32)) if STOCHASTIC else i
        store_rounded(mean + i, m, random_bits & 0xFFFF, there, STOCHASTIC)
        store_rounded(square + i, v, random_bits >> 16, there, STOCHASTIC)
        bits = w.to(tl.int32, bitcast=True)
        if COPY:
            tl.store(weights + i, ((bits + 0x8000) >> 16).to(tl.int16), mask=there)
        if SPLIT:
            tl.store(main + i, bits.to(tl.int16), mask=there)
        else:
            tl.store(main + i, w, mask=there)


@triton.jit
def sum_squares_kernel(x, parts, n, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of this program's elements: fp32 by lane, then over lanes."""
    first = tl.program_id(0).to(tl.int64) * SQUARES + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(SQUARES // BLOCK):
        i = first + step * BLOCK
        value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        total += value * value
    tl.store(parts + tl.program_id(0), tl.sum(total, 0).to(tl.float64))


def launch_adamw(main, g, m, v, weights, scale, scalars, options) -> None:
    """Weights are bf16, or None where `main` are the model's own; see adamw.py."""
    n = len(main)
    beta1, beta2, eps, _, stochastic = options
    bf16_weights = main if weights is None else weights.view(torch.int16)
    adamw_kernel[(triton.cdiv(n, BLOCK),)](
        main, g, m, v, bf16_weights, scale, scalars, n,
        1 - beta1, 1 - beta2, eps,
        SPLIT=main.dtype == torch.int16, COPY=weights is not None, STOCHASTIC=stochastic, BLOCK=BLOCK,
    )  # fmt: skip


def launch_add_squares(total: Tensor, *flats: Tensor) -> None:
    """Each program stores its sum; the sums of all tensors are then added in fp64, in the same order every time."""
    programs = [triton.cdiv(len(x), SQUARES_PER_PROGRAM) for x in flats]
    parts = torch.empty(sum(programs), dtype=torch.float64, device=total.device)
    for x, mine in zip(flats, parts.split(programs), strict=True):
        if len(mine):
            sum_squares_kernel[(len(mine),)](x, mine, len(x), SQUARES_PER_PROGRAM, BLOCK)
    total += parts.sum()
