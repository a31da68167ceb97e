"""GPT-OSS's activation: gate and up are cut off, the gate is steeper, and up has one added.

    y = (up + 1) x gate x sigmoid(1.702 gate)    gate cut off above `limit`, up at +-limit

times an optional factor per row (the router's gate). R rows, F inner width.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn

STEEPNESS = 1.702


@register_op
def clamped_swiglu(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None, limit: float) -> torch.Tensor:
    gate, up = gate_up_R2F.to(torch.promote_types(gate_up_R2F.dtype, torch.float32)).unbind(-2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = (up + 1) * gate * (STEEPNESS * gate).sigmoid()
    return (y if weight_R is None else y * weight_R[:, None]).to(gate_up_R2F.dtype)


@clamped_swiglu.register_fast("by_hand")
def _(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None, limit: float) -> torch.Tensor:
    return RecomputeClampedSwiGlu.apply(gate_up_R2F, weight_R, limit)  # pyright: ignore[reportReturnType]


class RecomputeClampedSwiGlu(torch.autograd.Function):
    """Keeps only its inputs. Beyond the limits the gradient is zero."""

    @staticmethod
    def forward(ctx, gate_up, scale, limit):
        ctx.save_for_backward(gate_up, scale)
        ctx.limit = limit
        return clamped_swiglu.reference(gate_up, scale, limit)

    @staticmethod
    def backward(ctx, *gradients):
        gate_up, scale = ctx.saved_tensors
        wide, limit = torch.promote_types(gate_up.dtype, torch.float32), ctx.limit
        raw_gate, raw_up = gate_up.to(wide).unbind(-2)
        gate, up = raw_gate.clamp(max=limit), raw_up.clamp(-limit, limit)
        dy, s = gradients[0].to(wide), (STEEPNESS * gate).sigmoid()
        d_scale = None
        if scale is not None:
            d_scale = (dy * (up + 1) * gate * s).sum(-1).to(scale.dtype)
            dy = dy * scale[:, None]
        d_gate = dy * (up + 1) * s * (1 + STEEPNESS * gate * (1 - s)) * (raw_gate <= limit)
        d_up = dy * gate * s * (raw_up.abs() <= limit)
        return torch.stack((d_gate, d_up), dim=-2).to(gate_up.dtype), d_scale, None


@clamped_swiglu.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for r, f in [(1, 8), (33, 64), (0, 16)]:
        x = seeded_randn(device, dtype, r, 2, f, scale=4.0)  # a good part beyond the limits
        yield KernelCase(f"{r} rows of {f}", (x, None, 3.0))
        yield KernelCase(f"{r} rows of {f}, scaled", (x, seeded_randn(device, wide, r, seed=1), 3.0))
