"""The residual add fused with the next RMSNorm: s = x + y, h = norm(s).

The norm is returned twice, once per consumer, so that both incoming gradients are summed inside this op's backward.

T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.registry import KernelCase, register_op, seeded_randn

SumAndNorms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # s, h, h


@register_op
def add_rmsnorm(x_TD: torch.Tensor, added_TD: torch.Tensor | None, w_D: torch.Tensor, eps: float) -> SumAndNorms:
    """(s, h, h). Before the first layer there is nothing to add, and s is x."""
    s_TD = x_TD if added_TD is None else x_TD + added_TD
    h_TD = rmsnorm(s_TD, w_D, eps)
    return s_TD, h_TD, h_TD


@add_rmsnorm.register_fast("triton")
def add_rmsnorm_triton(x_TD: torch.Tensor, added_TD: torch.Tensor | None, w_D: torch.Tensor, eps: float) -> SumAndNorms:
    return AddRmsNormFunction.apply(x_TD, added_TD, w_D, eps)  # pyright: ignore[reportReturnType]


@add_rmsnorm.register_fast("torch")
def add_rmsnorm_torch(x_TD: torch.Tensor, added_TD: torch.Tensor | None, w_D: torch.Tensor, eps: float) -> SumAndNorms:
    s_TD = x_TD if added_TD is None else x_TD + added_TD
    h_TD = F.rms_norm(s_TD, w_D.shape, w_D, eps)
    return s_TD, h_TD, h_TD


class AddRmsNormFunction(torch.autograd.Function):
    """Both summands have the gradient of the sum: through the norm, plus directly along the residual stream."""

    @staticmethod
    def forward(ctx, x_TD, added_TD, w_D, eps):
        from moefold.kernels.norm import norm_triton

        s_TD, h_TD, inverse_T = norm_triton.rmsnorm_forward(x_TD, added_TD, w_D, eps)
        ctx.save_for_backward(s_TD, inverse_T)
        ctx.weight = w_D  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        ctx.adds = added_TD is not None
        ctx.set_materialize_grads(False)
        return s_TD, h_TD, h_TD.view_as(h_TD)

    @staticmethod
    def backward(ctx, ds_TD, dh_TD, also_TD):
        from moefold.kernels.norm import norm_triton

        if dh_TD is None:  # the first consumer may have given no gradient
            dh_TD, also_TD = also_TD, None
        dw_D = None
        if dh_TD is not None:
            s_TD, inverse_T = ctx.saved_tensors
            ds_TD, dw_D = norm_triton.rmsnorm_backward(dh_TD, also_TD, s_TD, ctx.weight, inverse_T, ds_TD)
        d_added_TD = ds_TD if ctx.adds else None
        return ds_TD, d_added_TD, dw_D, None


@add_rmsnorm.register_cases
def add_rmsnorm_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for t, d in [(1, 8), (33, 64), (5, 96), (0, 16)]:
        x = seeded_randn(device, dtype, t, d)
        added = seeded_randn(device, dtype, t, d, seed=1)
        w = seeded_randn(device, dtype, d, seed=2)
        yield KernelCase(f"{t} rows of {d}", (x, added, w, 1e-6))
        yield KernelCase(f"{t} rows of {d}, nothing added", (x, None, w, 1e-6))
