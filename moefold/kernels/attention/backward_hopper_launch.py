"""Launches of attention's backward on Hopper. Imported only where Triton is.

B sequences, S positions, H query heads, G key/value heads, D head width; blocks of 128 positions, tiles of 64.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.attention.backward_hopper import attention_dkdv_hopper, attention_dq_hopper
from moefold.kernels.attention.heads_triton import (
    empty_gradients,
    load_head_block,
    outer_strides,
    program_head,
    row_dots,
)
from moefold.kernels.attention.workspace import HOPPER_HEAD_WIDTHS, kv_heads_at_once, score_gradient_rows
from moefold.kernels.hopper import block_descriptor

STAGES = dict(zip(HOPPER_HEAD_WIDTHS, (4, 3), strict=True))  # pipeline stages, by head width
PROGRAMS_PER_BAND = 256  # about two for each multiprocessor, a long one and a short one


@triton.jit
def attention_statistics(
    y, dy, lse, statistics, S, H, tiles, scale, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr
):  # fmt: skip
    """The accumulators' initial values for 64 queries: minus the log-sum-exp, unscaled, and minus delta = sum(dy * y).
    Behind the end the former is minus infinity: such queries see nothing."""
    # prologue: results of this program's queries, and their gradients
    b, h = program_head(H)
    rows = tl.program_id(0) * 64 + tl.arange(0, 64)
    y_head = y + b * y_b + h * y_h
    result = load_head_block(y_head, rows, y_s, S, D, D)
    dy_head = dy + b * d_b + h * d_h
    grads = load_head_block(dy_head, rows, d_s, S, D, D)
    # the log-sum-exp
    head = tl.program_id(1).to(tl.int64)
    sums = tl.load(lse + head * S + rows, mask=rows < S, other=float("inf"))
    tile = head * tiles + tl.program_id(0)
    here = statistics + tile * 128 + tl.arange(0, 64)
    tl.store(here, -sums / scale)
    # delta
    delta = row_dots(result, grads)
    tl.store(here + 64, -delta)


def hopper_backward_applies(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether the Hopper kernels can run here; wherever measured, they were faster than Triton's."""
    b, s, h, d = q.shape
    g = k.shape[2]
    if not q.is_cuda:
        return False
    major, _ = torch.cuda.get_device_capability(q.device)
    if major != 9:
        return False
    if not q.numel() or scale <= 0:
        return False
    if d not in HOPPER_HEAD_WIDTHS or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return kv_heads_at_once(s, b * g, h // g) > 0


def launch_hopper_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse_BHS: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of square causal attention; all tensors but the log-sum-exp are (B, S, heads, D)."""
    b, s, h, d = q.shape
    g = k.shape[2]
    group = h // g
    all_units = b * g
    blocks = triton.cdiv(s, 128)
    statistics = softmax_statistics(y, dy, lse_BHS.contiguous(), 2 * blocks, scale)
    dq, dk, dv = empty_gradients(q, k, v)
    # Workspace for dS^T of as many units as fit at once.
    together = kv_heads_at_once(s, all_units, group)
    rows = together * group * score_gradient_rows(s)
    workspace = torch.empty(rows, 64, dtype=q.dtype, device=q.device)
    # Descriptors of all tensors.
    ds = block_descriptor(workspace, 64, 64)
    inputs = [head_descriptor(x, d) for x in (q, k, v, dy)]
    keys = inputs[1]
    outputs = (head_descriptor(dk, d), head_descriptor(dv, d), ds, statistics)
    queries_gradient = head_descriptor(dq, 64)
    # Rounds of so many units.
    band = triton.cdiv(PROGRAMS_PER_BAND, blocks)
    sizes = (2 * blocks, h, group, band, scale)
    options = {"D": d, "STAGES": STAGES[d], "num_warps": 4}
    for unit in range(0, all_units, together):
        units = min(together, all_units - unit)
        attention_dkdv_hopper[units * blocks,](*inputs, *outputs, unit, units, *sizes, **options)
        # Half the registers, so that two programs share a multiprocessor.
        heads = units * group
        attention_dq_hopper[heads * blocks,](keys, ds, queries_gradient, unit, heads, *sizes, **options, maxnreg=128)
    return dq, dk, dv


def softmax_statistics(y: Tensor, dy: Tensor, lse_BHS: Tensor, tiles: int, scale: float) -> Tensor:
    """(B H, tiles, 2, 64): what `attention_statistics` computes."""
    b, s, h, d = y.shape
    statistics = torch.empty(b * h, tiles, 2, 64, dtype=torch.float32, device=y.device)
    strides = outer_strides(y, dy)
    attention_statistics[tiles, b * h](y, dy, lse_BHS, statistics, s, h, tiles, scale, *strides, d)
    return statistics


def head_descriptor(x_BSHD: Tensor, width: int) -> TensorDescriptor:
    """TMA descriptor of (sequence, position, column), for 64 positions of so many columns."""
    x = x_BSHD.flatten(2)
    b_stride, s_stride, _ = x.stride()
    unaligned = b_stride % 8 or s_stride % 8 or x.data_ptr() % 16
    if unaligned:
        x = x.clone(memory_format=torch.contiguous_format)
    return block_descriptor(x, 1, 64, width)
