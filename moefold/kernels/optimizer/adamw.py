"""One AdamW update of a flat tensor of main weights, in place.

m = b1 m + (1-b1) g        v = b2 v + (1-b2) g^2
w = w - lr decay w - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

g is the gradient times a factor on the device: one over the number of tokens, less where the gradient is clipped. A
factor that is not finite leaves everything as it is, so the host need not wait for it. The numbers that change from
step to step are on the device too (`AdamWScalars`): a captured graph reads those of the step it is replayed for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars, scalars_on_host
from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def adamw(
    main: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    weights: Tensor | None,
    scale: Tensor,
    scalars: Tensor,
    options: AdamWOptions,
    first: int = 0,
) -> None:
    """`main` are fp32 or better: the model's own weights, or else `weights` are the model's and get the rounded
    result. As int16, `main` is what bf16 `weights` lack of fp32 (split_fp32.py). `first`: the number of the first
    element, where a longer tensor is updated in parts; stochastic rounding depends on it."""
    if not scale.isfinite():
        return
    now = scalars_on_host(scalars)
    w = whole_main_weights(main, weights)
    # Moments: m and v themselves, unless they are kept in lower precision.
    g = scaled_gradient(g, scale, w.dtype)
    mean = m.to(w.dtype)
    mean.lerp_(g, 1 - options.beta1)
    square = v.to(w.dtype)
    square.mul_(options.beta2)
    square.addcmul_(g, g, value=1 - options.beta2)
    # Weights: decay, then the step.
    corrected = square / now.square_correction
    root = corrected.sqrt_().add_(options.eps)
    w.mul_(now.keep)
    w.addcdiv_(mean, root, value=-now.step_size)
    if options.stochastic:
        seed = int(now.seed)
        random_bits = hashed_random_bits(first, len(w), seed, w.device)
        mean = stochastic_round(mean, m.dtype, random_bits & 0xFFFF)
        square = stochastic_round(square, v.dtype, random_bits >> 16)
    copy_rounded(m, mean)
    copy_rounded(v, square)
    store_weights(w, main, weights)


def whole_main_weights(main: Tensor, weights: Tensor | None) -> Tensor:
    """The main weights themselves, or as fp32 a copy of those that are split."""
    if main.dtype != torch.int16:
        return main
    assert weights is not None
    return joined_fp32(weights, main)


def store_weights(w: Tensor, main: Tensor, weights: Tensor | None) -> None:
    """Write updated main weights back, if they are a copy, and the model's weights."""
    if main.dtype == torch.int16:
        main.copy_(lower_16_bits(w))
    if weights is not None:
        copy_rounded(weights, w)


def copy_rounded(to: Tensor, x: Tensor) -> None:
    rounded = round_to_nearest(x, to.dtype)
    to.copy_(rounded)


def scaled_gradient(g: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(g.dtype, dtype)
    scaled = g.to(wide) * scale
    return scaled.to(dtype)


def hashed_random_bits(first: int, n: int, seed: int, device: torch.device) -> Tensor:
    """32 random bits for each of n elements, as int64: the number of the element, mixed with the seed until every bit
    depends on every other (shifts and odd factors, each of which can be undone: no two elements get the same)."""
    x = torch.arange(first, first + n, device=device) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = (x * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def stochastic_round(x: Tensor, dtype: torch.dtype, random_bits: Tensor) -> Tensor:
    """fp32 to bf16: up in magnitude if the 16 bits that go exceed a random number. Other types are kept as they are."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x
    added = random_bits.to(torch.int32)
    bits = x.view(torch.int32) + added
    upper = bits & -65536
    return upper.view(torch.float32)


@adamw.register_fast("triton")
def adamw_triton(main, g, m, v, weights, scale, scalars, options, first=0) -> None:
    from moefold.kernels.optimizer import optimizer_triton

    optimizer_triton.launch_adamw(main, g, m, v, weights, scale, scalars, options, first)


@adamw.register_fast("fused")
def adamw_fused(main, g, m, v, weights, scale, scalars, options, first=0) -> None:
    if not scale.isfinite():
        return
    now = scalars_on_host(scalars)
    w = whole_main_weights(main, weights)
    step = w.new_tensor(now.step, dtype=torch.float32)
    gradient = scaled_gradient(g, scale, w.dtype)
    torch._fused_adamw_(
        [w],
        [gradient],
        [m],
        [v],
        [],
        [step],
        lr=now.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
    )
    store_weights(w, main, weights)


@adamw.register_cases
def adamw_cases(draw: CaseInputs) -> Cases:
    for n in (1, 33, 100_003):
        for step in (1, 100):
            yield from cases_of_size(draw, n, step)


def cases_of_size(draw: CaseInputs, n: int, step: int) -> Cases:
    main = draw.wide(n)
    g = draw.wide(n, seed=1)
    m = draw.wide(n, seed=2)
    v = draw.wide(n, seed=3).square()
    scale = torch.tensor(0.5, dtype=draw.wide_dtype, device=draw.device)
    options = AdamWOptions(0.9, 0.95, 1e-8, 0.1)
    now = adamw_scalars(step, 1e-3, options, seed=7)
    scalars = torch.tensor(now, dtype=torch.float64, device=draw.device)
    weights = None
    if draw.wide_dtype != draw.dtype:
        weights = round_to_nearest(main, draw.dtype)
    name = f"{n} weights, step {step}"
    inputs = (main, g, m, v, weights, scale, scalars, options)
    yield KernelCase(name, inputs)
    if weights is None:
        return
    lower = lower_16_bits(main)
    split = (lower, *inputs[1:])
    yield KernelCase(f"{name}, split", split, main="split")
    low = [x.to(draw.dtype) for x in (g, m, v)]
    state = (*low, weights, scale, scalars)
    for rounding in ("nearest", "stochastic"):
        rounded = options._replace(stochastic=rounding == "stochastic")
        about = f"{name}, bf16 gradients and moments, {rounding}"
        yield KernelCase(about, (main, *state, rounded), moments="bf16")
        yield KernelCase(f"{about}, split", (lower, *state, rounded), moments="bf16", main="split")
