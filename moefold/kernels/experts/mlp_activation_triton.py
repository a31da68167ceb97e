"""Activations of MLPs and experts in Triton: one pass each way, one program per row. Imported only where Triton is.

R rows, F inner width; a gated row has its gate followed by its up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.anatomy.activations import ActivationKind
from moefold.kernels.experts.swiglu_triton import load_fp32, load_row_weight, store_like, store_row_sum
from moefold.kernels.tile_triton import program_block, wide_program_id

BLOCK = 1024


@triton.jit
def function_and_slope(x, FUNCTION: tl.constexpr):
    """silu and gelu_tanh are x times the sigmoid of a polynomial in x."""
    if FUNCTION == "gelu":
        scaled = x * 0.7071067811865476
        share = 0.5 + 0.5 * tl.erf(scaled)
        power = -0.5 * x * x
        density = 0.3989422804014327 * tl.exp(power)
        value = x * share
        slope = share + x * density
    elif FUNCTION == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif FUNCTION == "relu2":
        relu = tl.maximum(x, 0.0)
        value = relu * relu
        slope = 2 * relu
    else:
        inner = x
        inner_slope = 1.0
        if FUNCTION == "gelu_tanh":
            square = x * x
            inner = 1.5957691216057308 * x * (1 + 0.044715 * square)
            inner_slope = 1.5957691216057308 * (1 + 0.134145 * square)
        s = tl.sigmoid(inner)
        value = x * s
        rest = 1 - s
        slope = s + value * rest * inner_slope
    return value, slope


@triton.jit
def activation_forward_kernel(
    h, weight_R, y_RF, F, FUNCTION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    r = wide_program_id(0)
    f = program_block(1, BLOCK)
    inside = f < F
    PARTS: tl.constexpr = 2 if GATED else 1
    x_at = h + r * PARTS * F + f
    x = load_fp32(x_at, inside)
    y, _ = function_and_slope(x, FUNCTION)
    if GATED:
        y *= load_fp32(x_at + F, inside)
    if SCALED:
        weight = tl.load(weight_R + r)
        y *= weight.to(tl.float32)
    row = y_RF + r * F
    store_like(row + f, y, inside)


@triton.jit
def activation_backward_kernel(
    dy_RF,
    h,
    weight_R,
    dh,
    d_weight_R,
    F,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # prologue: the row's weight, and its gradient by lane
    r = wide_program_id(0)
    PARTS: tl.constexpr = 2 if GATED else 1
    weight = load_row_weight(weight_R, r, SCALED)
    d_weight = tl.zeros([BLOCK], tl.float32)
    # main loop over blocks of the row
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        inside = f < F
        at = r * PARTS * F + f
        x = load_fp32(h + at, inside)
        dy_row = dy_RF + r * F
        dy = load_fp32(dy_row + f, inside)
        # the function again, and the weight's gradient
        value, slope = function_and_slope(x, FUNCTION)
        d_value = dy
        if GATED:
            up = load_fp32(h + at + F, inside)
            d_value = dy * up
        d_weight += d_value * value
        # the gradients of gate and up, or of up alone
        dx_at = dh + at
        dx = d_value * weight * slope
        store_like(dx_at, dx, inside)
        if GATED:
            d_up_at = dx_at + F
            d_up = dy * weight * value
            store_like(d_up_at, d_up, inside)
    # epilogue
    if SCALED:
        store_row_sum(d_weight_R, r, d_weight)


def activation_forward(h: Tensor, weight_R: Tensor | None, kind: ActivationKind) -> Tensor:
    rows, *_, inner = h.shape
    y_RF = h.new_empty(rows, inner)
    if y_RF.numel():
        blocks = triton.cdiv(inner, BLOCK)
        flags = launch_flags(kind, weight_R)
        launch = activation_forward_kernel[rows, blocks]
        launch(h, weight_R, y_RF, inner, **flags)
    return y_RF


def activation_backward(
    dy_RF: Tensor, h: Tensor, weight_R: Tensor | None, kind: ActivationKind
) -> tuple[Tensor, Tensor | None]:
    """The gradients of gate and up, or of up alone, and of the row weights if there are any."""
    rows, *_, inner = h.shape
    dh = torch.empty_like(h)
    d_weight_R = None if weight_R is None else torch.zeros_like(weight_R)
    if dy_RF.numel():
        dy_RF = dy_RF.contiguous()
        flags = launch_flags(kind, weight_R)
        launch = activation_backward_kernel[(rows,)]
        launch(dy_RF, h, weight_R, dh, d_weight_R, inner, **flags)
    return dh, d_weight_R


def launch_flags(kind: ActivationKind, weight_R: Tensor | None) -> dict[str, str | bool | int]:
    scaled = weight_R is not None
    return {"FUNCTION": kind.function, "GATED": kind.gated, "SCALED": scaled, "BLOCK": BLOCK}
