"""Muon's passes over flat tensors in Triton: every element is read once and written once. Imported only where Triton
is installed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from moefold.kernels.optimizer.muon_scalars import MuonScalars
from moefold.kernels.optimizer.optimizer_triton import (
    BLOCK,
    hashed_bits,
    is_finite,
    load_fp32,
    load_main,
    load_scalar,
    scalar_place,
    store_main,
    store_rounded,
    weight_bits,
)
from moefold.kernels.tile_triton import wide_program_id

LR = scalar_place("lr", MuonScalars)
KEEP = scalar_place("keep", MuonScalars)
SEED = scalar_place("seed", MuonScalars)


@triton.jit
def muon_momentum_kernel(
    direction,
    momentum,
    gradient,
    scale,
    scalars,
    n,
    first,
    beta,
    NESTEROV: constexpr,
    STOCHASTIC: constexpr,
    BLOCK: constexpr,
):
    """beta: what the momentum keeps of itself."""
    factor = tl.load(scale).to(tl.float32)
    i = wide_program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    g = load_fp32(gradient, i, there) * factor
    m = load_fp32(momentum, i, there)
    m += (g - m) * (1 - beta)
    d = m
    if NESTEROV:
        d = g + (m - g) * beta
    sound = tl.where(is_finite(factor), d, 0.0)
    store_rounded(direction + i, sound, i, there, False)
    if is_finite(factor):
        random_bits = i
        if STOCHASTIC:
            seed = tl.load(scalars + SEED).to(tl.int64)
            number = (i + first).to(tl.uint32)
            random_bits = hashed_bits(number ^ seed.to(tl.uint32))
        store_rounded(momentum + i, m, random_bits & 0xFFFF, there, STOCHASTIC)


@triton.jit
def muon_weights_kernel(
    main,
    weights,
    orthogonal,
    matrix_scale,
    scale,
    scalars,
    n,
    first,
    SPLIT: constexpr,
    COPY: constexpr,
    STOCHASTIC: constexpr,
    BLOCK: constexpr,
):
    """SPLIT, COPY and STOCHASTIC (of main weights) as in optimizer_triton.py."""
    factor = tl.load(scale).to(tl.float32)
    if is_finite(factor):
        lr = load_scalar(scalars, LR)
        keep = load_scalar(scalars, KEEP)
        seed = tl.load(scalars + SEED).to(tl.int64)
        i = wide_program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = i < n
        w = load_main(main, weights, i, there, SPLIT)
        o = load_fp32(orthogonal, i, there)
        w = w * keep - o * (lr * matrix_scale)
        number = (i + first).to(tl.uint32)
        store_main(main, weights, w, number, seed, i, there, SPLIT, COPY, STOCHASTIC)


def launch_muon_momentum(direction, momentum, g, scale, scalars, options, first) -> None:
    n = len(momentum)
    programs = triton.cdiv(n, BLOCK)
    modes = {"NESTEROV": options.nesterov, "STOCHASTIC": options.stochastic}
    beta = options.momentum
    muon_momentum_kernel[(programs,)](direction, momentum, g, scale, scalars, n, first, beta, **modes, BLOCK=BLOCK)


def launch_muon_weights(main, weights, orthogonal, matrix_scale, scale, scalars, first, stochastic) -> None:
    n = len(main)
    programs = triton.cdiv(n, BLOCK)
    split = main.dtype == torch.int16
    modes = {"SPLIT": split, "COPY": weights is not None, "STOCHASTIC": stochastic}
    tensors = (main, weight_bits(main, weights), orthogonal)
    muon_weights_kernel[(programs,)](*tensors, matrix_scale, scale, scalars, n, first, **modes, BLOCK=BLOCK)
