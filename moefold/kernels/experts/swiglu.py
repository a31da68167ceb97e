"""The gated activation silu(gate) * up, times an optional factor per row (the router's gate).

R rows, F inner width. Applying the router's gate here, before the second GEMM, is the memory-efficient permutation:
the expert's output then needs no copy for the gate's gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def swiglu(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    wide = gate_up_R2F.to(torch.promote_types(gate_up_R2F.dtype, torch.float32))
    gate, up = wide.unbind(-2)
    y = F.silu(gate) * up
    return (y if weight_R is None else y * weight_R[:, None]).to(gate_up_R2F.dtype)


@swiglu.register_fast("triton")
def _(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    return TritonSwiGlu.apply(gate_up_R2F, weight_R)  # pyright: ignore[reportReturnType]


@swiglu.register_fast("by_hand")
def _(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    return RecomputeSwiGlu.apply(gate_up_R2F, weight_R)  # pyright: ignore[reportReturnType]


class TritonSwiGlu(torch.autograd.Function):
    """Keeps only its inputs."""

    @staticmethod
    def forward(ctx, gate_up, scale):
        from moefold.kernels.experts import swiglu_triton

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, scale)
        return swiglu_triton.swiglu_forward(gate_up, scale)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.experts import swiglu_triton

        gate_up, scale = ctx.saved_tensors
        return swiglu_triton.swiglu_backward(gradients[0], gate_up, scale)


class RecomputeSwiGlu(torch.autograd.Function):
    """Keeps only its inputs: d silu(g) = s + g s (1 - s) with s = sigmoid(g)."""

    @staticmethod
    def forward(ctx, gate_up, scale):
        ctx.save_for_backward(gate_up, scale)
        return swiglu.reference(gate_up, scale)

    @staticmethod
    def backward(ctx, dy):
        gate_up, scale = ctx.saved_tensors
        wide = torch.promote_types(gate_up.dtype, torch.float32)
        gate, up = gate_up.to(wide).unbind(-2)
        dy = dy.to(wide)
        s = gate.sigmoid()
        silu = gate * s
        d_scale = None
        if scale is not None:
            d_scale = (dy * silu * up).sum(-1).to(scale.dtype)
            dy = dy * scale[:, None]
        d_gate_up = torch.stack((dy * up * (s + silu * (1 - s)), dy * silu), dim=-2)
        return d_gate_up.to(gate_up.dtype), d_scale


@swiglu.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for r, f in [(1, 8), (33, 64), (0, 16), (256, 192)]:
        x = seeded_randn(device, dtype, r, 2, f)
        yield KernelCase(f"{r} rows of {f}", (x, None))
        yield KernelCase(f"{r} rows of {f}, scaled", (x, seeded_randn(device, wide, r, seed=1)))
