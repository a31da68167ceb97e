"""What a layer gives is added to the residual stream, and the new stream is normed for the next: s = x + y, norm(s).

Two who read the norm are each given it: what they give back for it is then added where the norm's gradient is made.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def add_rmsnorm(
    x_TD: torch.Tensor, added_TD: torch.Tensor | None, w_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(s, its norm, and that once more). At the beginning there is nothing to add, and s is x."""
    s_TD = x_TD if added_TD is None else x_TD + added_TD
    h_TD = rmsnorm(s_TD, w_D, eps)
    return s_TD, h_TD, h_TD


@add_rmsnorm.register_fast("triton")
def _(x_TD, added_TD, w_D, eps) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return AddRmsNormFunction.apply(x_TD, added_TD, w_D, eps)  # pyright: ignore[reportReturnType]


@add_rmsnorm.register_fast("torch")
def _(x_TD, added_TD, w_D, eps) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s_TD = x_TD if added_TD is None else x_TD + added_TD
    h_TD = F.rms_norm(s_TD, w_D.shape, w_D, eps)
    return s_TD, h_TD, h_TD


class AddRmsNormFunction(torch.autograd.Function):
    """Both summands have the gradient of the sum: what it gets through the norm, and what it gets past it."""

    @staticmethod
    def forward(ctx, x_TD, added_TD, w_D, eps):
        from moefold.kernels.norm import norm_triton

        s_TD, h_TD, inverse_T = norm_triton.rmsnorm_forward(x_TD, added_TD, w_D, eps)
        ctx.save_for_backward(s_TD, inverse_T)
        ctx.weight = w_D  # itself: it knows where its gradient goes
        ctx.adds = added_TD is not None
        ctx.set_materialize_grads(False)
        return s_TD, h_TD, h_TD.view_as(h_TD)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm import norm_triton

        ds_TD, *read = gradients
        dh_TD, also_TD = sorted(read, key=lambda d: d is None)  # one who read it may give nothing back
        dw_D = None
        if dh_TD is not None:
            s_TD, inverse_T = ctx.saved_tensors
            ds_TD, dw_D = norm_triton.rmsnorm_backward(dh_TD, also_TD, s_TD, ctx.weight, inverse_T, ds_TD)
        return ds_TD, ds_TD if ctx.adds else None, dw_D, None


@add_rmsnorm.register_cases
def _(device: str, dtype: torch.dtype):
    for t, d in [(1, 8), (33, 64), (5, 96), (0, 16)]:
        x, added, w = (seeded_randn(device, dtype, *shape, seed=i) for i, shape in enumerate([(t, d), (t, d), (d,)]))
        yield KernelCase(f"{t} rows of {d}", (x, added, w, 1e-6))
        yield KernelCase(f"{t} rows of {d}, nothing added", (x, None, w, 1e-6))
