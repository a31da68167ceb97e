"""The optimizer's passes over flat buckets, in Triton: every element is read once and written once. Imported only where
Triton is."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of a program: eight a thread, which is 16 bytes of bf16
SQUARES_PER_PROGRAM = 16 * BLOCK  # elements of which a program adds up the squares


@triton.jit
def hashed_bits(x):
    """A random number for each number, as in adamw.py."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def store_rounded(at, x, chance, there, CHANCE: tl.constexpr):
    """As fp32, or as bf16: by chance, or the nearest (halves.py)."""
    if at.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True) + (chance.to(tl.int32) if CHANCE else 0x8000)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(at, x.to(at.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    main, gradient, mean, square, weights, scale, n,
    lr, keep, beta1, beta2, eps, root, seed,
    HALVES: tl.constexpr, COPY: tl.constexpr, CHANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`lr` is corrected for the mean's start, `root` for the mean square's; the betas are the new value's share."""
    factor = tl.load(scale).to(tl.float32)
    if tl.abs(factor) < float("inf"):  # neither infinite nor NaN
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = i < n
        if HALVES:
            upper = tl.load(weights + i, mask=there, other=0).to(tl.int32)
            lower = tl.load(main + i, mask=there, other=0).to(tl.int32)
            w = ((upper << 16) + lower).to(tl.float32, bitcast=True)
        else:
            w = tl.load(main + i, mask=there, other=0.0)
        g = tl.load(gradient + i, mask=there, other=0.0).to(tl.float32) * factor
        m = tl.load(mean + i, mask=there, other=0.0).to(tl.float32)
        v = tl.load(square + i, mask=there, other=0.0).to(tl.float32)
        m += (g - m) * beta1
        v += (g * g - v) * beta2
        w = w * keep - lr * m / (tl.sqrt(v) * root + eps)
        chance = hashed_bits(i.to(tl.uint32) ^ seed.to(tl.uint32)) if CHANCE else i
        store_rounded(mean + i, m, chance & 0xFFFF, there, CHANCE)
        store_rounded(square + i, v, chance >> 16, there, CHANCE)
        bits = w.to(tl.int32, bitcast=True)
        if COPY:
            tl.store(weights + i, ((bits + 0x8000) >> 16).to(tl.int16), mask=there)
        if HALVES:
            tl.store(main + i, bits.to(tl.int16), mask=there)
        else:
            tl.store(main + i, w, mask=there)


@triton.jit
def sum_squares_kernel(x, parts, n, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * SQUARES + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(SQUARES // BLOCK):
        i = first + step * BLOCK
        value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        total += value * value
    tl.store(parts + tl.program_id(0), tl.sum(total, 0).to(tl.float64))


def launch_adamw(main, g, m, v, weights, scale, pace) -> None:
    """Weights are bf16, or none are apart from `main`; see adamw.py."""
    step, lr, beta1, beta2, eps, decay, seed = pace
    n = len(main)
    correction = 1 - beta2**step
    adamw_kernel[(triton.cdiv(n, BLOCK),)](
        main, g, m, v, main if weights is None else weights.view(torch.int16), scale, n,
        lr / (1 - beta1**step), 1 - lr * decay, 1 - beta1, 1 - beta2, eps, correction**-0.5, seed or 0,
        HALVES=main.dtype == torch.int16, COPY=weights is not None, CHANCE=seed is not None, BLOCK=BLOCK,
    )  # fmt: skip


def launch_add_squares(total: torch.Tensor, *flats: torch.Tensor) -> None:
    """Programs leave their sums, which are then added in fp64, those of all tensors at once: the same order every
    time."""
    programs = [triton.cdiv(len(x), SQUARES_PER_PROGRAM) for x in flats]
    parts = torch.empty(sum(programs), dtype=torch.float64, device=total.device)
    for x, mine in zip(flats, parts.split(programs), strict=True):
        if len(mine):
            sum_squares_kernel[(len(mine),)](x, mine, len(x), SQUARES_PER_PROGRAM, BLOCK)
    total += parts.sum()
