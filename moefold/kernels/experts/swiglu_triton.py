"""SwiGLU in Triton: one pass each way, one program per row. Imported only where Triton is.

R rows, F inner width; a row's gate is followed by its up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def swiglu_forward_kernel(gate_up_R2F, weight_R, y_RF, F, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    gate_at = gate_up_R2F + r * 2 * F + f
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    silu = gate * tl.sigmoid(gate)
    up = tl.load(gate_at + F, mask=inside, other=0.0).to(tl.float32)
    y = silu * up
    if SCALED:
        y *= tl.load(weight_R + r).to(tl.float32)
    tl.store(y_RF + r * F + f, y.to(y_RF.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    dy_RF, gate_up_R2F, weight_R, d_gate_up_R2F, d_weight_R, F, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """d silu(g) = s + g s (1 - s) with s = sigmoid(g)."""
    r = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_R + r).to(tl.float32) if SCALED else 1.0
    d_weight = tl.zeros([BLOCK], tl.float32)
    out_type = d_gate_up_R2F.dtype.element_ty
    # main loop over blocks of the row
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        inside = f < F
        at = r * 2 * F + f
        gate = tl.load(gate_up_R2F + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_R2F + at + F, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_RF + r * F + f, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        d_weight += dy * silu * up
        dy *= weight
        d_gate = dy * up * (s + silu * (1 - s))
        d_up = dy * silu
        tl.store(d_gate_up_R2F + at, d_gate.to(out_type), mask=inside)
        tl.store(d_gate_up_R2F + at + F, d_up.to(out_type), mask=inside)
    # epilogue: one sum over the row
    if SCALED:
        total = tl.sum(d_weight, 0)
        tl.store(d_weight_R + r, total.to(d_weight_R.dtype.element_ty))


def swiglu_forward(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    rows, _, inner = gate_up_R2F.shape
    y_RF = gate_up_R2F.new_empty(rows, inner)
    if y_RF.numel():
        grid = (rows, triton.cdiv(inner, BLOCK))
        scaled = weight_R is not None
        swiglu_forward_kernel[grid](gate_up_R2F, weight_R, y_RF, inner, SCALED=scaled, BLOCK=BLOCK)
    return y_RF


def swiglu_backward(
    dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of gate and up, and of the row weights if there are any."""
    rows, _, inner = gate_up_R2F.shape
    scaled = weight_R is not None
    d_gate_up_R2F = torch.empty_like(gate_up_R2F)
    d_weight_R = torch.zeros_like(weight_R) if scaled else None
    if dy_RF.numel():
        swiglu_backward_kernel[(rows,)](
            dy_RF.contiguous(), gate_up_R2F, weight_R, d_gate_up_R2F, d_weight_R, inner, SCALED=scaled, BLOCK=BLOCK
        )
    return d_gate_up_R2F, d_weight_R
