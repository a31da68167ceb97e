"""The gated activation in Triton: one pass each way, a program for a row. Imported only where Triton is.

R rows, F inner width; gate and up of a row lie behind each other.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def swiglu_forward_kernel(gate_up_R2F, weight_R, y_RF, F, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up_R2F + r * 2 * F + f
    gate = tl.load(at, mask=f < F, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * tl.load(at + F, mask=f < F, other=0.0).to(tl.float32)
    if SCALED:
        y *= tl.load(weight_R + r).to(tl.float32)
    tl.store(y_RF + r * F + f, y.to(y_RF.dtype.element_ty), mask=f < F)


@triton.jit
def swiglu_backward_kernel(
    dy_RF, gate_up_R2F, weight_R, d_gate_up_R2F, d_weight_R, F, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """d silu(g) = s + g s (1 - s) with s = sigmoid(g)."""
    r = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight_R + r).to(tl.float32) if SCALED else 1.0
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        at = r * 2 * F + f
        gate = tl.load(gate_up_R2F + at, mask=f < F, other=0.0).to(tl.float32)
        up = tl.load(gate_up_R2F + at + F, mask=f < F, other=0.0).to(tl.float32)
        dy = tl.load(dy_RF + r * F + f, mask=f < F, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        along += dy * silu * up
        dy *= scale
        kind = d_gate_up_R2F.dtype.element_ty
        tl.store(d_gate_up_R2F + at, (dy * up * (s + silu * (1 - s))).to(kind), mask=f < F)
        tl.store(d_gate_up_R2F + at + F, (dy * silu).to(kind), mask=f < F)
    if SCALED:
        tl.store(d_weight_R + r, tl.sum(along, 0).to(d_weight_R.dtype.element_ty))


def swiglu_forward(gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    rows, _, inner = gate_up_R2F.shape
    y_RF = gate_up_R2F.new_empty(rows, inner)
    if y_RF.numel():
        grid = (rows, triton.cdiv(inner, BLOCK))
        swiglu_forward_kernel[grid](gate_up_R2F, weight_R, y_RF, inner, SCALED=weight_R is not None, BLOCK=BLOCK)
    return y_RF


def swiglu_backward(dy_RF: torch.Tensor, gate_up_R2F: torch.Tensor, weight_R: torch.Tensor | None):
    """(gradient of gate and up, of the scale if there is one)."""
    rows, _, inner = gate_up_R2F.shape
    d_gate_up_R2F = torch.empty_like(gate_up_R2F)
    d_weight_R = None if weight_R is None else torch.zeros_like(weight_R)
    if dy_RF.numel():
        swiglu_backward_kernel[(rows,)](
            dy_RF.contiguous(), gate_up_R2F, weight_R, d_gate_up_R2F, d_weight_R, inner,
            SCALED=weight_R is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return d_gate_up_R2F, d_weight_R
