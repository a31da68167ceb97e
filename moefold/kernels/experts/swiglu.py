"""SwiGLU, the gated activation silu(gate) * up, times an optional factor per row (the router's weight).

R rows, F inner width. Applying the router's weight here, before the second GEMM, saves memory: the expert's output need
not be kept for the weight's gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


def in_fp32_or_better(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


@register_op
def swiglu(gate_up_R2F: Tensor, weight_R: Tensor | None = None) -> Tensor:
    wide = in_fp32_or_better(gate_up_R2F)
    gate, up = wide.unbind(-2)
    y = F.silu(gate) * up
    if weight_R is not None:
        y = y * weight_R[:, None]
    return y.to(gate_up_R2F.dtype)


@swiglu.register_fast("triton")
def swiglu_triton(gate_up_R2F: Tensor, weight_R: Tensor | None = None) -> Tensor:
    return TritonSwiGlu.apply(gate_up_R2F, weight_R)  # pyright: ignore[reportReturnType]


@swiglu.register_fast("recompute_backward")
def swiglu_recompute_backward(gate_up_R2F: Tensor, weight_R: Tensor | None = None) -> Tensor:
    return RecomputeSwiGlu.apply(gate_up_R2F, weight_R)  # pyright: ignore[reportReturnType]


class TritonSwiGlu(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx, gate_up, weight):
        from moefold.kernels.experts.swiglu_triton import swiglu_forward

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weight)
        return swiglu_forward(gate_up, weight)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.experts.swiglu_triton import swiglu_backward

        gate_up, weight = ctx.saved_tensors
        return swiglu_backward(gradients[0], gate_up, weight)


class RecomputeSwiGlu(torch.autograd.Function):
    """Saves only its inputs. Few passes over memory, most of them in place: on a CPU each pass costs as much as a good
    part of a product."""

    @staticmethod
    def forward(ctx, gate_up, weight):
        ctx.save_for_backward(gate_up, weight)
        wide = in_fp32_or_better(gate_up)
        gate, up = wide.unbind(-2)
        y = F.silu(gate).mul_(up)
        if weight is not None:
            y.mul_(weight[:, None])
        return y.to(gate_up.dtype)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight = ctx.saved_tensors
        wide = in_fp32_or_better(gate_up)
        gate, up = wide.unbind(-2)
        dy = dy.to(wide.dtype)
        d_wide = torch.empty_like(wide)
        d_gate, d_up = d_wide.unbind(-2)
        torch.mul(dy, F.silu(gate), out=d_up)
        d_silu = dy * up
        d_weight = None
        if weight is not None:
            torch.mul(d_up, up, out=d_gate)
            d_weight = d_gate.sum(-1)
            d_weight = d_weight.to(weight.dtype)
        silu_backward = torch.ops.aten.silu_backward.grad_input
        silu_backward(d_silu, gate, grad_input=d_gate)
        if weight is not None:
            d_wide.mul_(weight[:, None, None])
        return d_wide.to(gate_up.dtype), d_weight


SWIGLU_SIZES = [  # R, F
    (1, 8),
    (33, 64),
    (0, 16),
    (256, 192),
]


@swiglu.register_cases
def swiglu_cases(draw: CaseInputs) -> Cases:
    for r, f in SWIGLU_SIZES:
        x = draw.normal(r, 2, f)
        weight = draw.wide(r, seed=1)
        about = f"{r} rows of {f}"
        yield KernelCase(about, (x, None))
        yield KernelCase(f"{about}, scaled", (x, weight))
    x = draw.normal(40, 2, 64)
    weight = draw.wide(40, seed=1)
    rows = (33, 40)
    yield KernelCase("33 rows of 64, 7 undefined behind them", (x, weight), rows=rows)
