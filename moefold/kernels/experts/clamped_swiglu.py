"""Clamped SwiGLU, the activation of GPT-OSS: gate and up are clamped, the gate is steeper, and one is added to up.

    y = (up + 1) x gate x sigmoid(1.702 gate)    gate clamped to at most `limit`, up to +-limit

times an optional factor per row (the router's weight). R rows, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op

STEEPNESS = 1.702


@register_op
def clamped_swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None, limit: float) -> Tensor:
    wide = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate, up = gate_up_R2F.to(wide).unbind(-2)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    s = (STEEPNESS * gate).sigmoid()
    y = (up + 1) * gate * s
    if weight_R is not None:
        y = y * weight_R[:, None]
    return y.to(gate_up_R2F.dtype)


@clamped_swiglu.register_fast("recompute_backward")
def clamped_swiglu_recompute_backward(gate_up_R2F: Tensor, weight_R: Tensor | None, limit: float) -> Tensor:
    return RecomputeClampedSwiGlu.apply(gate_up_R2F, weight_R, limit)  # pyright: ignore[reportReturnType]


class RecomputeClampedSwiGlu(torch.autograd.Function):
    """Saves only its inputs. Beyond the limits the gradient is zero."""

    @staticmethod
    def forward(ctx, gate_up, weight, limit):
        ctx.save_for_backward(gate_up, weight)
        ctx.limit = limit
        return clamped_swiglu.reference(gate_up, weight, limit)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight = ctx.saved_tensors
        limit = ctx.limit
        wide = torch.promote_types(gate_up.dtype, torch.float32)
        raw_gate, raw_up = gate_up.to(wide).unbind(-2)
        gate = raw_gate.clamp(max=limit)
        up = raw_up.clamp(-limit, limit)
        dy = dy.to(wide)
        s = (STEEPNESS * gate).sigmoid()
        # The weight's gradient.
        d_weight = None
        if weight is not None:
            summands = dy * (up + 1) * gate * s
            d_weight = summands.sum(-1)
            d_weight = d_weight.to(weight.dtype)
            dy = dy * weight[:, None]
        # Those of gate and up, where they are within the limits.
        slope = 1 + STEEPNESS * gate * (1 - s)
        d_gate = dy * (up + 1) * s * slope
        d_gate = d_gate * (raw_gate <= limit)
        d_up = dy * gate * s
        d_up = d_up * (raw_up.abs() <= limit)
        d_gate_up = torch.stack((d_gate, d_up), dim=-2)
        return d_gate_up.to(gate_up.dtype), d_weight, None


CLAMPED_SWIGLU_SIZES = [  # R, F
    (1, 8),
    (33, 64),
    (0, 16),
]


@clamped_swiglu.register_cases
def clamped_swiglu_cases(draw: CaseInputs) -> Cases:
    for r, f in CLAMPED_SWIGLU_SIZES:
        x = draw.normal(r, 2, f, scale=4.0)  # a good part lies beyond the limits
        weight = draw.wide(r, seed=1)
        yield KernelCase(f"{r} rows of {f}", (x, None, 3.0))
        yield KernelCase(f"{r} rows of {f}, scaled", (x, weight, 3.0))
    x = draw.normal(40, 2, 64, scale=4.0)
    weight = draw.wide(40, seed=1)
    yield KernelCase("33 rows of 64, 7 undefined behind them", (x, weight, 3.0), rows=(33, 40))
