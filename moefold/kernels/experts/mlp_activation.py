"""Activations of MLPs and experts beside SwiGLU, gated and ungated, times an optional factor per row (the router's
weight).

    gated      y = function(gate) * up    input (R, 2, F)
    ungated    y = function(up)           input (R, F)

R rows, F inner width. Functions: silu, gelu, gelu_tanh (the approximation of GELU by tanh), relu, relu2 (squared ReLU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.anatomy.activations import ACTIVATIONS, OWN_OPS, ActivationKind
from moefold.kernels.experts.swiglu import in_fp32_or_better
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op

TANH_SCALE = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715  # of gelu_tanh: x sigmoid(2 TANH_SCALE (x + TANH_CUBIC x^3))

Function = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


def silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s + x * s * (1 - s)


def gelu_slope(x: Tensor) -> Tensor:
    scaled = x * math.sqrt(0.5)
    share = 0.5 + 0.5 * scaled.erf()
    power = -0.5 * x * x
    density = power.exp() / math.sqrt(2 * math.pi)
    return share + x * density


def gelu_tanh_slope(x: Tensor) -> Tensor:
    square = x * x
    inner = 2 * TANH_SCALE * x * (1 + TANH_CUBIC * square)
    s = inner.sigmoid()
    inner_slope = 2 * TANH_SCALE * (1 + 3 * TANH_CUBIC * square)
    return s + x * s * (1 - s) * inner_slope


def relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def squared_relu_slope(x: Tensor) -> Tensor:
    return 2 * x.relu()


FUNCTIONS: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": squared_relu,
}
SLOPES: dict[str, Function] = {
    "silu": silu_slope,
    "gelu": gelu_slope,
    "gelu_tanh": gelu_tanh_slope,
    "relu": relu_slope,
    "relu2": squared_relu_slope,
}


@register_op
def mlp_activation(h: Tensor, weight_R: Tensor | None, kind: ActivationKind) -> Tensor:
    wide = in_fp32_or_better(h)
    function = FUNCTIONS[kind.function]
    if kind.gated:
        gate, up = wide.unbind(-2)
        y = function(gate) * up
    else:
        y = function(wide)
    if weight_R is not None:
        y = y * weight_R[:, None]
    return y.to(h.dtype)


@mlp_activation.register_fast("triton")
def mlp_activation_triton(h: Tensor, weight_R: Tensor | None, kind: ActivationKind) -> Tensor:
    return TritonActivation.apply(h, weight_R, kind)  # pyright: ignore[reportReturnType]


@mlp_activation.register_fast("recompute_backward")
def mlp_activation_recompute_backward(h: Tensor, weight_R: Tensor | None, kind: ActivationKind) -> Tensor:
    return RecomputeActivation.apply(h, weight_R, kind)  # pyright: ignore[reportReturnType]


class TritonActivation(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx, h, weight, kind):
        from moefold.kernels.experts.mlp_activation_triton import activation_forward

        h = h.contiguous()
        ctx.save_for_backward(h, weight)
        ctx.kind = kind
        return activation_forward(h, weight, kind)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.experts.mlp_activation_triton import activation_backward

        h, weight = ctx.saved_tensors
        dh, d_weight = activation_backward(gradients[0], h, weight, ctx.kind)
        return dh, d_weight, None


class RecomputeActivation(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx, h, weight, kind):
        ctx.save_for_backward(h, weight)
        ctx.kind = kind
        return mlp_activation.reference(h, weight, kind)

    @staticmethod
    def backward(ctx, dy):
        h, weight = ctx.saved_tensors
        kind = ctx.kind
        x = in_fp32_or_better(h)
        dy = dy.to(x.dtype)
        up = None
        if kind.gated:
            x, up = x.unbind(-2)
        # The weight's gradient.
        value = FUNCTIONS[kind.function](x)
        d_weight = None
        if weight is not None:
            y = value if up is None else value * up
            dots = dy * y
            d_weight = dots.sum(-1)
            d_weight = d_weight.to(weight.dtype)
            dy = dy * weight[:, None]
        # Those of gate and up, or of up alone.
        slope = SLOPES[kind.function](x)
        if up is None:
            dh = dy * slope
        else:
            d_gate = dy * up * slope
            d_up = dy * value
            both = (d_gate, d_up)
            dh = torch.stack(both, dim=-2)
        return dh.to(h.dtype), d_weight, None


ACTIVATION_CASE_SIZES = [  # R, F
    (1, 8),
    (33, 64),
    (0, 16),
    (5, 320),
]


@mlp_activation.register_cases
def mlp_activation_cases(draw: CaseInputs) -> Cases:
    for name, kind in ACTIVATIONS.items():
        if name in OWN_OPS:
            continue
        for r, f in ACTIVATION_CASE_SIZES:
            outputs = kind.up_outputs(f)
            x = draw.normal(r, *outputs, scale=2.0)
            weight = draw.wide(r, seed=1)
            about = f"{name}, {r} rows of {f}"
            yield KernelCase(about, (x, None, kind))
            yield KernelCase(f"{about}, scaled", (x, weight, kind))
        outputs = kind.up_outputs(64)
        x = draw.normal(40, *outputs, scale=2.0)
        weight = draw.wide(40, seed=1)
        about = f"{name}, 33 rows of 64, 7 undefined behind them"
        rows = (33, 40)
        yield KernelCase(about, (x, weight, kind), rows=rows)
