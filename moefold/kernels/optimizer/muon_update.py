"""Muon's two passes over flat tensors: before Newton-Schulz and behind it.

    m = b m + (1-b) g              d = (1-b) g + b m with Nesterov, else m
    w = keep w - lr scale o        o is d, orthogonalised; keep is what weight decay leaves

g is the gradient times a factor on the device, as in adamw.py. A factor that is not finite leaves momentum and weights
as they are, and the direction is zero; the host does not wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.optimizer.adamw import (
    copy_rounded,
    hashed_random_bits,
    scaled_gradient,
    stochastic_round,
    store_or_round_weights,
    weight_random_bits,
    whole_main_weights,
)
from moefold.kernels.optimizer.muon_scalars import MuonOptions, MuonScalars
from moefold.kernels.optimizer.split_fp32 import lower_16_bits, round_to_nearest
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op

LR, KEEP, SEED = range(len(MuonScalars._fields))


@register_in_place_op
def muon_momentum(
    direction: Tensor,
    momentum: Tensor,
    g: Tensor,
    scale: Tensor,
    scalars: Tensor,
    options: MuonOptions,
    first: int = 0,
) -> None:
    """Update the momentum and write the direction of the step. `first`: the number of the first element, where a
    longer tensor is updated in parts; stochastic rounding depends on it."""
    is_finite = scale.isfinite()
    wide = torch.promote_types(direction.dtype, torch.float32)
    gradient = scaled_gradient(g, scale, wide)
    kept = momentum.to(wide)
    mean = kept.lerp(gradient, 1 - options.momentum)
    ahead = mean
    if options.nesterov:
        ahead = gradient.lerp(mean, options.momentum)
    copy_rounded(direction, ahead.where(is_finite, 0))
    if options.stochastic:
        seed = scalars[SEED].to(torch.int64)
        random_bits = hashed_random_bits(first, len(mean), seed, mean.device)
        mean = stochastic_round(mean, momentum.dtype, random_bits & 0xFFFF)
    copy_rounded(momentum, mean.where(is_finite, kept))


@register_in_place_op
def muon_weights(
    main: Tensor,
    weights: Tensor | None,
    orthogonal: Tensor,
    matrix_scale: float,
    scale: Tensor,
    scalars: Tensor,
    first: int = 0,
    stochastic: bool = True,
) -> None:
    """Decay main weights and move them along orthogonal matrices. `main`, `weights` and `first` as in adamw.py.
    `stochastic`: main weights in bf16 are rounded stochastically."""
    is_finite = scale.isfinite()
    w = whole_main_weights(main, weights)
    numbers = scalars.to(w.dtype)
    keep = numbers[KEEP].where(is_finite, 1)
    step = numbers[LR] * matrix_scale
    step = step.where(is_finite, 0)
    moved = orthogonal.to(w.dtype) * step
    w.mul_(keep)
    w.sub_(moved)
    random_bits = None
    if stochastic:
        seed = scalars[SEED].to(torch.int64)
        random_bits = weight_random_bits(first, len(w), seed, w.device)
    store_or_round_weights(w, main, weights, random_bits)


@muon_momentum.register_fast("triton")
def muon_momentum_triton(direction, momentum, g, scale, scalars, options, first=0) -> None:
    from moefold.kernels.optimizer import muon_update_triton

    muon_update_triton.launch_muon_momentum(direction, momentum, g, scale, scalars, options, first)


@muon_weights.register_fast("triton")
def muon_weights_triton(
    main, weights, orthogonal, matrix_scale, scale, scalars, first=0, stochastic=True
) -> None:  # fmt: skip
    from moefold.kernels.optimizer import muon_update_triton

    muon_update_triton.launch_muon_weights(main, weights, orthogonal, matrix_scale, scale, scalars, first, stochastic)


def case_numbers(draw: CaseInputs) -> tuple[Tensor, Tensor]:
    """The scale of gradients, and the numbers of a step."""
    scale = torch.tensor(0.5, dtype=draw.wide_dtype, device=draw.device)
    now = MuonScalars(lr=1e-2, keep=0.99, seed=7)
    scalars = torch.tensor(now, dtype=torch.float64, device=draw.device)
    return scale, scalars


@muon_momentum.register_cases
def muon_momentum_cases(draw: CaseInputs) -> Cases:
    scale, scalars = case_numbers(draw)
    for n in (1, 33, 100_003):
        direction = draw.normal(n)
        momentum = draw.wide(n, seed=1)
        g = draw.wide(n, seed=2)
        for nesterov in (True, False):
            name = f"{n} elements, nesterov {nesterov}"
            options = MuonOptions(0.95, nesterov)
            yield KernelCase(name, (direction, momentum, g, scale, scalars, options))
        if draw.dtype == draw.wide_dtype:
            continue
        low = [x.to(draw.dtype) for x in (momentum, g)]
        rounded = MuonOptions(0.95, True, stochastic=True)
        inputs = (direction, *low, scale, scalars, rounded)
        yield KernelCase(f"{n} elements, bf16 momentum", inputs, moments="bf16")


@muon_weights.register_cases
def muon_weights_cases(draw: CaseInputs) -> Cases:
    numbers = case_numbers(draw)
    matrix_scale = 3.0
    for n in (1, 33, 100_003):
        main = draw.wide(n)
        orthogonal = draw.normal(n, seed=1)
        behind = (orthogonal, matrix_scale, *numbers)
        name = f"{n} weights"
        if draw.dtype == draw.wide_dtype:
            yield KernelCase(name, (main, None, *behind))
            continue
        weights = round_to_nearest(main, draw.dtype)
        lower = lower_16_bits(main)
        yield KernelCase(name, (main, weights, *behind))
        yield KernelCase(f"{name}, split", (lower, weights, *behind), main="split")
        for stochastic in (True, False):
            about = f"{name}, no main weights, stochastic {stochastic}"
            yield KernelCase(about, (weights, None, *behind, 0, stochastic), main="none")
