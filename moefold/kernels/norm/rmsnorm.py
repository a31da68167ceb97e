"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * w, with the mean in fp32 or better; by itself, or
fused with the residual add before it: s = x + y, h = norm(s).

The fused op returns the norm twice, once per consumer, so that both incoming gradients are summed in its backward.

T tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

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
    if x_TD.device.type == "cpu":  # where torch composes its norm of many ops, each with a backward of its own
        return FewPassesRmsNorm.apply(x_TD, w_D, eps)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x_TD, w_D.shape, w_D, eps)


class InverseAndNorm(NamedTuple):
    """One over the root mean square of each row, in fp32 or better, and the norm."""

    inverse_T1: Tensor
    y_TD: Tensor


def norm_in_few_passes(x_TD: Tensor, w_D: Tensor, eps: float) -> InverseAndNorm:
    wide = in_wide_type(x_TD)
    width = len(w_D)
    length_T1 = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse_T1 = length_T1.square_().div_(width).add_(eps).rsqrt_()
    y_TD = wide * inverse_T1
    y_TD.mul_(w_D)
    return InverseAndNorm(inverse_T1, y_TD.to(x_TD.dtype))


def norm_gradients(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, inverse_T1: Tensor) -> tuple[Tensor, Tensor]:
    """dx, in fp32 or better, and dw. With p = dy x they are sums of p along rows and columns: two products with a
    vector, and dx = r w dy - x r^3 (p w) / D with r one over the root mean square."""
    wide_x = in_wide_type(x_TD).reshape(-1, len(w_D))
    wide_dy = in_wide_type(dy_TD).reshape(wide_x.shape)
    wide_w = w_D.to(wide_x.dtype)
    inverse_T = inverse_T1.flatten()
    p_TD = wide_dy * wide_x
    dw_D = torch.mv(p_TD.T, inverse_T)
    share_T = torch.mv(p_TD, wide_w)
    share_T.mul_(inverse_T.pow(3)).div_(-len(w_D))
    dx_TD = torch.mul(wide_dy, wide_w, out=p_TD)
    dx_TD.mul_(inverse_T[:, None])
    dx_TD.addcmul_(wide_x, share_T[:, None])
    return dx_TD.view(x_TD.shape), dw_D.to(w_D.dtype)


def in_wide_type(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


class FewPassesRmsNorm(torch.autograd.Function):
    """Saves the input and one over its root mean square."""

    @staticmethod
    def forward(ctx, x_TD, w_D, eps):
        inverse_T1, y_TD = norm_in_few_passes(x_TD, w_D, eps)
        ctx.save_for_backward(x_TD, w_D, inverse_T1)
        return y_TD

    @staticmethod
    def backward(ctx, *gradients):
        x_TD, w_D, inverse_T1 = ctx.saved_tensors
        dx_TD, dw_D = norm_gradients(gradients[0], x_TD, w_D, inverse_T1)
        return dx_TD.to(x_TD.dtype), dw_D, None


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
    if x_TD.device.type == "cpu":
        return FewPassesAddRmsNorm.apply(x_TD, added_TD, w_D, eps)  # pyright: ignore[reportReturnType]
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


class FewPassesAddRmsNorm(torch.autograd.Function):
    """The same in torch's own ops."""

    @staticmethod
    def forward(ctx, x_TD, added_TD, w_D, eps):
        s_TD = x_TD.view_as(x_TD) if added_TD is None else x_TD + added_TD
        inverse_T1, h_TD = norm_in_few_passes(s_TD, w_D, eps)
        ctx.save_for_backward(s_TD, w_D, inverse_T1)
        ctx.adds = added_TD is not None
        ctx.set_materialize_grads(False)
        return s_TD, h_TD, h_TD.view_as(h_TD)

    @staticmethod
    def backward(ctx, *gradients):
        ds_TD, *of_norm = gradients
        found = [dh_TD for dh_TD in of_norm if dh_TD is not None]
        dw_D = None
        if found:
            dh_TD = found[0] if len(found) == 1 else found[0] + found[1]
            s_TD, w_D, inverse_T1 = ctx.saved_tensors
            through_TD, dw_D = norm_gradients(dh_TD, s_TD, w_D, inverse_T1)
            if ds_TD is not None:
                through_TD.add_(ds_TD)
            ds_TD = through_TD.to(s_TD.dtype)
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
