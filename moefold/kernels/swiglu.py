"""The gated activation silu(gate) * up, times an optional factor per row (the router's gate).

R rows, F inner width. Applying the router's gate here, before the second GEMM, is the memory-efficient permutation:
the expert's output then needs no copy for the gate's gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import Case, op, random


@op
def swiglu(gate_up_R2F: torch.Tensor, scale_R: torch.Tensor | None = None) -> torch.Tensor:
    wide = gate_up_R2F.to(torch.promote_types(gate_up_R2F.dtype, torch.float32))
    gate, up = wide.unbind(-2)
    y = F.silu(gate) * up
    return (y if scale_R is None else y * scale_R[:, None]).to(gate_up_R2F.dtype)


@swiglu.fast("triton")
def _(gate_up_R2F: torch.Tensor, scale_R: torch.Tensor | None = None) -> torch.Tensor:
    return InOnePass.apply(gate_up_R2F, scale_R)  # pyright: ignore[reportReturnType]


@swiglu.fast("by_hand")
def _(gate_up_R2F: torch.Tensor, scale_R: torch.Tensor | None = None) -> torch.Tensor:
    return SwiGlu.apply(gate_up_R2F, scale_R)  # pyright: ignore[reportReturnType]


class InOnePass(torch.autograd.Function):
    """Keeps only its inputs."""

    @staticmethod
    def forward(ctx, gate_up, scale):
        from moefold.kernels import swiglu_kernels

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, scale)
        return swiglu_kernels.forward(gate_up, scale)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels import swiglu_kernels

        gate_up, scale = ctx.saved_tensors
        return swiglu_kernels.backward(gradients[0], gate_up, scale)


class SwiGlu(torch.autograd.Function):
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


@swiglu.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for r, f in [(1, 8), (33, 64), (0, 16), (256, 192)]:
        x = random(device, dtype, r, 2, f)
        yield Case(f"{r} rows of {f}", (x, None))
        yield Case(f"{r} rows of {f}, scaled", (x, random(device, wide, r, seed=1)))
