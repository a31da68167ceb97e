"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * w, with the mean in fp32 or better; by itself, or
fused with the residual add before it: s = x + y, h = norm(s).

The fused op returns the norm twice, once per consumer, so that both incoming gradients are summed in its backward.

T tokens, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


@register_op
def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    wide = x_TD.to(dtype)
    squares = wide.square()
    mean_square = squares.mean(-1, keepdim=True)
    inverse = torch.rsqrt(mean_square + eps)
    normed = wide * inverse
    weighted = normed * w_D.to(dtype)
    return weighted.to(x_TD.dtype)


@rmsnorm.register_fast("triton")
def rmsnorm_triton(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    return RmsNormFunction.apply(x_TD, w_D, eps)  # pyright: ignore[reportReturnType]


@rmsnorm.register_fast("torch")
def rmsnorm_torch(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
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
        dy_TD = gradients[0]
        weight = ctx.weight
        dx_TD, dw_D = norm_triton.rmsnorm_backward(dy_TD, None, x_TD, weight, inverse_T, None)
        return dx_TD, dw_D, None


RMSNORM_CASE_SIZES = [  # ..., D
    (1, 8),
    (33, 64),
    (4, 5, 96),
    (0, 16),
]


@rmsnorm.register_cases
def rmsnorm_cases(draw: CaseInputs) -> Cases:
    for *lead, d in RMSNORM_CASE_SIZES:
        x = draw.normal(*lead, d)
        w = draw.normal(d, seed=1)
        sizes = map(str, lead)
        rows = "x".join(sizes)
        yield KernelCase(f"{rows} rows of {d}", (x, w, 1e-6))


SumAndNorms = tuple[Tensor, Tensor, Tensor]  # s, h, h


@register_op
def add_rmsnorm(x_TD: Tensor, added_TD: Tensor | None, w_D: Tensor, eps: float) -> SumAndNorms:
    """(s, h, h). Before the first layer there is nothing to add, and s is x."""
    s_TD = add_unless_none(x_TD, added_TD)
    h_TD = rmsnorm(s_TD, w_D, eps)
    return s_TD, h_TD, h_TD


def add_unless_none(x_TD: Tensor, added_TD: Tensor | None) -> Tensor:
    if added_TD is None:
        return x_TD
    return x_TD + added_TD


@add_rmsnorm.register_fast("triton")
def add_rmsnorm_triton(x_TD: Tensor, added_TD: Tensor | None, w_D: Tensor, eps: float) -> SumAndNorms:
    return AddRmsNormFunction.apply(x_TD, added_TD, w_D, eps)  # pyright: ignore[reportReturnType]


@add_rmsnorm.register_fast("torch")
def add_rmsnorm_torch(x_TD: Tensor, added_TD: Tensor | None, w_D: Tensor, eps: float) -> SumAndNorms:
    s_TD = add_unless_none(x_TD, added_TD)
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
            dh_TD = also_TD
            also_TD = None
        dw_D = None
        if dh_TD is not None:
            s_TD, inverse_T = ctx.saved_tensors
            weight = ctx.weight
            found = norm_triton.rmsnorm_backward(dh_TD, also_TD, s_TD, weight, inverse_T, ds_TD)
            ds_TD, dw_D = found
        d_added_TD = ds_TD if ctx.adds else None
        return ds_TD, d_added_TD, dw_D, None


ADD_RMSNORM_CASE_SIZES = [  # T, D
    (1, 8),
    (33, 64),
    (5, 96),
    (0, 16),
]


@add_rmsnorm.register_cases
def add_rmsnorm_cases(draw: CaseInputs) -> Cases:
    for t, d in ADD_RMSNORM_CASE_SIZES:
        x = draw.normal(t, d)
        added = draw.normal(t, d, seed=1)
        w = draw.normal(d, seed=2)
        about = f"{t} rows of {d}"
        inputs = (x, added, w, 1e-6)
        yield KernelCase(about, inputs)
        inputs = (x, None, w, 1e-6)
        yield KernelCase(f"{about}, nothing added", inputs)
