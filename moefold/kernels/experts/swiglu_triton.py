"""SwiGLU in Triton: one pass each way, one program per row. Imported only where Triton is.

R rows, F inner width; a row's gate is followed by its up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_or_zero, program_block, wide_program_id

BLOCK = 1024


@triton.jit
def load_fp32(at, inside):
    value = load_or_zero(at, inside)
    return value.to(tl.float32)


@triton.jit
def store_like(at, value, inside):
    """Store in the type of what the pointers point to."""
    rounded = value.to(at.dtype.element_ty)
    tl.store(at, rounded, mask=inside)


@triton.jit
def load_row_weight(weight_R, r, SCALED: constexpr):
    if SCALED:
        weight = tl.load(weight_R + r)
        return weight.to(tl.float32)
    else:
        return 1.0


@triton.jit
def store_row_sum(out_R, r, summands):
    """One sum over the row, in the type of what the pointer points to."""
    total = tl.sum(summands, 0)
    rounded = total.to(out_R.dtype.element_ty)
    tl.store(out_R + r, rounded)


@triton.jit
def swiglu_forward_kernel(gate_up_R2F, weight_R, y_RF, F, SCALED: constexpr, BLOCK: constexpr):
    r = wide_program_id(0)
    f = program_block(1, BLOCK)
    inside = f < F
    gate_at = gate_up_R2F + r * 2 * F + f
    gate = load_fp32(gate_at, inside)
    silu = gate * tl.sigmoid(gate)
    up = load_fp32(gate_at + F, inside)
    y = silu * up
    if SCALED:
        weight = tl.load(weight_R + r)
        y *= weight.to(tl.float32)
    row = y_RF + r * F
    store_like(row + f, y, inside)


@triton.jit
def swiglu_backward_kernel(
    dy_RF, gate_up_R2F, weight_R, d_gate_up_R2F, d_weight_R, F, SCALED: constexpr, BLOCK: constexpr
):
    """d silu(g) = s + g s (1 - s) with s = sigmoid(g)."""
    # prologue: the row's weight, and its gradient by lane
    r = wide_program_id(0)
    weight = load_row_weight(weight_R, r, SCALED)
    d_weight = tl.zeros([BLOCK], tl.float32)
    # main loop over blocks of the row
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        inside = f < F
        at = r * 2 * F + f
        gate_at = gate_up_R2F + at
        gate = load_fp32(gate_at, inside)
        up = load_fp32(gate_at + F, inside)
        dy_row = dy_RF + r * F
        dy = load_fp32(dy_row + f, inside)
        # SwiGLU again, and the weight's gradient
        s = tl.sigmoid(gate)
        silu = gate * s
        d_weight += dy * silu * up
        # the gradients of gate and up
        dy *= weight
        rest = 1 - s
        d_silu = s + silu * rest
        d_gate = dy * up * d_silu
        d_up = dy * silu
        d_gate_at = d_gate_up_R2F + at
        store_like(d_gate_at, d_gate, inside)
        store_like(d_gate_at + F, d_up, inside)
    # epilogue
    if SCALED:
        store_row_sum(d_weight_R, r, d_weight)


def swiglu_forward(gate_up_R2F: Tensor, weight_R: Tensor | None) -> Tensor:
    rows, _, inner = gate_up_R2F.shape
    y_RF = gate_up_R2F.new_empty(rows, inner)
    scaled = weight_R is not None
    if y_RF.numel():
        blocks = triton.cdiv(inner, BLOCK)
        launch = swiglu_forward_kernel[rows, blocks]
        launch(gate_up_R2F, weight_R, y_RF, inner, SCALED=scaled, BLOCK=BLOCK)
    return y_RF


def swiglu_backward(dy_RF: Tensor, gate_up_R2F: Tensor, weight_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of gate and up, and of the row weights if there are any."""
    rows, _, inner = gate_up_R2F.shape
    scaled = weight_R is not None
    d_gate_up_R2F = torch.empty_like(gate_up_R2F)
    d_weight_R = torch.zeros_like(weight_R) if scaled else None
    if dy_RF.numel():
        dy_RF = dy_RF.contiguous()
        inputs = (dy_RF, gate_up_R2F, weight_R)
        gradients = (d_gate_up_R2F, d_weight_R)
        launch = swiglu_backward_kernel[(rows,)]
        launch(*inputs, *gradients, inner, SCALED=scaled, BLOCK=BLOCK)
    return d_gate_up_R2F, d_weight_R
