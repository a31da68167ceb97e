"""Clamped SwiGLU, the activation of GPT-OSS: gate and up are clamped, the gate is steeper, and one is added to up.

    y = (up + 1) x gate x sigmoid(1.702 gate)    gate clamped to at most `limit`, up to +-limit

times an optional factor per row (the router's weight). R rows, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.experts.swiglu import in_fp32_or_better
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op

STEEPNESS = 1.702


@register_op
def clamped_swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None, limit: float) -> Tensor:
    wide = in_fp32_or_better(gate_up_R2F)
    gate, up = wide.unbind(-2)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    s = steep_sigmoid(gate)
    raised_up = up + 1
    y = raised_up * gate * s
    if weight_R is not None:
        y = y * weight_R[:, None]
    return y.to(gate_up_R2F.dtype)


def steep_sigmoid(gate: Tensor) -> Tensor:
    steep = STEEPNESS * gate
    return steep.sigmoid()


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
        wide = in_fp32_or_better(gate_up)
        raw_gate, raw_up = wide.unbind(-2)
        gate = raw_gate.clamp(max=limit)
        up = raw_up.clamp(-limit, limit)
        raised_up = up + 1
        dy = dy.to(wide.dtype)
        s = steep_sigmoid(gate)
        # The weight's gradient.
        d_weight = None
        if weight is not None:
            summands = dy * raised_up * gate * s
            d_weight = summands.sum(-1)
            d_weight = d_weight.to(weight.dtype)
            dy = dy * weight[:, None]
        # Those of gate and up, where they are within the limits.
        rest = 1 - s
        slope = 1 + STEEPNESS * gate * rest
        d_gate = dy * raised_up * s * slope
        gate_within = raw_gate <= limit
        d_gate = d_gate * gate_within
        d_up = dy * gate * s
        up_within = raw_up.abs() <= limit
        d_up = d_up * up_within
        both = (d_gate, d_up)
        d_gate_up = torch.stack(both, dim=-2)
        d_gate_up = d_gate_up.to(gate_up.dtype)
        return d_gate_up, d_weight, None


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
        about = f"{r} rows of {f}"
        yield KernelCase(about, (x, None, 3.0))
        yield KernelCase(f"{about}, scaled", (x, weight, 3.0))
    x = draw.normal(40, 2, 64, scale=4.0)
    weight = draw.wide(40, seed=1)
    inputs = (x, weight, 3.0)
    rows = (33, 40)
    yield KernelCase("33 rows of 64, 7 undefined behind them", inputs, rows=rows)
