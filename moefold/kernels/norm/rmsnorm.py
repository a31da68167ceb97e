"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * w, with the mean in fp32 or better.

T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def rmsnorm(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square + eps)
    return (normed * w_D.to(normed.dtype)).to(x_TD.dtype)


@rmsnorm.register_fast("triton")
def rmsnorm_triton(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    return RmsNormFunction.apply(x_TD, w_D, eps)  # pyright: ignore[reportReturnType]


@rmsnorm.register_fast("torch")
def rmsnorm_torch(x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_TD, w_D.shape, w_D, eps)


class RmsNormFunction(torch.autograd.Function):
    """Saves the input and one over its root mean square."""

    @staticmethod
    def forward(ctx, x_TD, w_D, eps):
        from moefold.kernels.norm import norm_triton

        x_TD, y_TD, inverse_T = norm_triton.rmsnorm_forward(x_TD, None, w_D, eps)
        ctx.save_for_backward(x_TD, inverse_T)
        ctx.weight = w_D  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        return y_TD

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm import norm_triton

        x_TD, inverse_T = ctx.saved_tensors
        dx_TD, dw_D = norm_triton.rmsnorm_backward(gradients[0], None, x_TD, ctx.weight, inverse_T, None)
        return dx_TD, dw_D, None


@rmsnorm.register_cases
def rmsnorm_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for *lead, d in [(1, 8), (33, 64), (4, 5, 96), (0, 16)]:
        x = seeded_randn(device, dtype, *lead, d)
        w = seeded_randn(device, dtype, d, seed=1)
        rows = "x".join(map(str, lead))
        yield KernelCase(f"{rows} rows of {d}", (x, w, 1e-6))
