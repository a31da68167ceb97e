"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * w, with the mean in fp32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import Case, op, random


@op
def rmsnorm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * w_D.to(normed.dtype)).to(x_TD.dtype)


@rmsnorm.fast("torch")
def _(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_TD, w_D.shape, w_D, eps)


@rmsnorm.cases
def _(device: str, dtype: torch.dtype):
    for *lead, d in [(1, 8), (33, 64), (4, 5, 96), (0, 16)]:
        x, w = random(device, dtype, *lead, d), random(device, dtype, d, seed=1)
        yield Case(f"{'x'.join(map(str, lead))} rows of {d}", (x, w, 1e-6))
