"""One AdamW update of a flat tensor of main weights, in place.

m = b1 m + (1-b1) g        v = b2 v + (1-b2) g^2
w = w - lr decay w - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

g is the gradient times a factor that is on the device: one over the number of tokens, less where the gradient is
clipped. A factor that is no finite number leaves everything as it is, so nobody needs to wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest
from moefold.kernels.registry import KernelCase, register_in_place_op, seeded_randn


class AdamWStep(NamedTuple):
    """The numbers of one step; `step` counts from one. With a `seed`, bf16 moments are rounded up or down by chance,
    in proportion to how near they are: then changes below the resolution of bf16 add up in the mean."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    seed: int | None = None


@register_in_place_op
def adamw(
    main: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    weights: torch.Tensor | None,
    scale: torch.Tensor,
    pace: AdamWStep,
) -> None:
    """`main` are fp32 or better: the model's own weights, or else `weights` are the model's and get the rounded
    result. As int16, `main` is what `weights` lack of fp32 (halves.py)."""
    if not scale.isfinite():
        return
    step, lr, beta1, beta2, eps, decay, seed = pace
    split = weights is not None and main.dtype == torch.int16
    w = joined_fp32(weights, main) if split else main  # pyright: ignore[reportArgumentType]
    g = scaled_gradient(g, scale, w.dtype)
    mean = m.to(w.dtype).lerp_(g, 1 - beta1)  # m itself, unless it is kept in lower precision
    square = v.to(w.dtype).mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(eps)
    w.mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))
    chance = None if seed is None else hashed_random_bits(len(w), seed, w.device)
    m.copy_(round_to_nearest(mean, m.dtype) if chance is None else stochastic_round(mean, m.dtype, chance & 0xFFFF))
    v.copy_(round_to_nearest(square, v.dtype) if chance is None else stochastic_round(square, v.dtype, chance >> 16))
    if split:
        main.copy_(lower_16_bits(w))
    if weights is not None:
        weights.copy_(round_to_nearest(w, weights.dtype))


def scaled_gradient(g: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (g.to(torch.promote_types(g.dtype, dtype)) * scale).to(dtype)


def hashed_random_bits(n: int, seed: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each of n elements, as int64: the number of the element, mixed with the seed until every bit
    depends on every other (shifts and odd factors, each of which can be undone: no two elements get the same)."""
    x = torch.arange(n, device=device) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def stochastic_round(x: torch.Tensor, dtype: torch.dtype, chance: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: up in magnitude if the 16 bits that go exceed a random number. Other types are kept as they are."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x
    return ((x.view(torch.int32) + chance.to(torch.int32)) & -65536).view(torch.float32)


@adamw.register_fast("triton")
def _(main, g, m, v, weights, scale, pace) -> None:
    from moefold.kernels.optimizer import optimizer_triton

    optimizer_triton.launch_adamw(main, g, m, v, weights, scale, pace)


@adamw.register_fast("fused")
def _(main, g, m, v, weights, scale, pace) -> None:
    if not scale.isfinite():
        return
    torch._fused_adamw_(
        [main],
        [scaled_gradient(g, scale, main.dtype)],
        [m],
        [v],
        [],
        [torch.tensor(float(pace.step), device=main.device)],
        lr=pace.lr,
        beta1=pace.beta1,
        beta2=pace.beta2,
        weight_decay=pace.decay,
        eps=pace.eps,
        amsgrad=False,
        maximize=False,
    )
    if weights is not None:
        weights.copy_(round_to_nearest(main, weights.dtype))


@adamw.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for n in (1, 33, 100_003):
        for step in (1, 100):
            main, g, m = (seeded_randn(device, wide, n, seed=i) for i in range(3))
            v, scale = seeded_randn(device, wide, n, seed=3).square(), torch.tensor(0.5, dtype=wide, device=device)
            pace = AdamWStep(step, 1e-3, 0.9, 0.95, 1e-8, 0.1)
            weights = None if wide == dtype else round_to_nearest(main, dtype)
            yield KernelCase(f"{n} weights, step {step}", (main, g, m, v, weights, scale, pace))
            if weights is None:
                continue
            state = (g.to(dtype), m.to(dtype), v.to(dtype), weights, scale)
            for name, how in {"nearest": pace, "by chance": pace._replace(seed=7)}.items():
                about = f"{n} weights, step {step}, bf16 gradients and moments, {name}"
                yield KernelCase(about, (main, *state, how), moments="bf16")
                yield KernelCase(f"{about}, halves", (lower_16_bits(main), *state, how), moments="bf16", main="split")
