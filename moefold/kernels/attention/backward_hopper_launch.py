"""The launches of attention's backward on Hopper. Imported only where Triton is.

B sequences, S positions, H query heads, G key/value heads, D head width; blocks of 128 positions, tiles of 64.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.attention.backward_hopper import attention_dkdv_hopper, attention_dq_hopper
from moefold.kernels.attention.workspace import HOPPER_HEAD_WIDTHS, kv_heads_at_once, score_gradient_rows
from moefold.kernels.hopper import block_descriptor

STAGES = dict(zip(HOPPER_HEAD_WIDTHS, (4, 3), strict=True))  # tiles on their way, by head width
PROGRAMS_PER_BAND = 256  # programs in a band: about two for each multiprocessor, a long one and a short one


@triton.jit
def attention_statistics(
    y, dy, lse, statistics, S, H, tiles, scale, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr
):  # fmt: skip
    """Of 64 queries, what scores and dP begin with: minus the log-sum-exp, unscaled, and minus the sum of the result
    times its gradient. Behind the end the former is minus infinity: such queries see nothing."""
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows, columns = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, D)
    inside, head = rows < S, tl.program_id(1).to(tl.int64)
    result = tl.load(y + b * y_b + h * y_h + rows[:, None] * y_s + columns, mask=inside[:, None], other=0.0)
    grads = tl.load(dy + b * d_b + h * d_h + rows[:, None] * d_s + columns, mask=inside[:, None], other=0.0)
    sums = tl.load(lse + head * S + rows, mask=inside, other=float("inf"))
    here = statistics + (head * tiles + tl.program_id(0)) * 128 + tl.arange(0, 64)
    tl.store(here, -sums / scale)
    tl.store(here + 64, -tl.sum(result.to(tl.float32) * grads.to(tl.float32), 1))


def hopper_backward_applies(q: torch.Tensor, k: torch.Tensor, scale: float) -> bool:
    """Whether this is for the kernels below. They were faster than Triton's wherever measured, if they can do it."""
    (b, s, h, d), g = q.shape, k.shape[2]
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or not q.numel() or scale <= 0:
        return False
    return (
        d in HOPPER_HEAD_WIDTHS
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv_heads_at_once(s, b * g, h // g) > 0
    )


def launch_hopper_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    lse_BHS: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of square causal attention; all tensors but the log-sum-exp are (B, S, heads, D)."""
    (b, s, h, d), g = q.shape, k.shape[2]
    group, blocks = h // g, triton.cdiv(s, 128)
    statistics = softmax_statistics(y, dy, lse_BHS.contiguous(), 2 * blocks, scale)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    together = kv_heads_at_once(s, b * g, group)
    ds = block_descriptor(
        torch.empty(together * group * score_gradient_rows(s), 64, dtype=q.dtype, device=q.device), 64, 64
    )
    inputs = (head_descriptor(q, d), head_descriptor(k, d), head_descriptor(v, d), head_descriptor(dy, d))
    outputs = (head_descriptor(dk, d), head_descriptor(dv, d), ds, statistics)
    sizes = (2 * blocks, h, group, triton.cdiv(PROGRAMS_PER_BAND, blocks), scale)
    how = {"D": d, "STAGES": STAGES[d], "num_warps": 4}
    for unit in range(0, b * g, together):
        units = min(together, b * g - unit)
        attention_dkdv_hopper[units * blocks,](*inputs, *outputs, unit, units, *sizes, **how)
        # Half the registers, so that two programs share a multiprocessor.
        attention_dq_hopper[units * group * blocks,](
            inputs[1], ds, head_descriptor(dq, 64), unit, units * group, *sizes, **how, maxnreg=128
        )
    return dq, dk, dv


def softmax_statistics(
    y: torch.Tensor, dy: torch.Tensor, lse_BHS: torch.Tensor, tiles: int, scale: float
) -> torch.Tensor:
    """(B H, tiles, 2, 64)"""
    b, s, h, d = y.shape
    found = torch.empty(b * h, tiles, 2, 64, dtype=torch.float32, device=y.device)
    attention_statistics[tiles, b * h](
        y, dy, lse_BHS, found, s, h, tiles, scale, *y.stride()[:3], *dy.stride()[:3], d
    )  # fmt: skip
    return found


def head_descriptor(x_BSHD: torch.Tensor, width: int) -> TensorDescriptor:
    """64 positions of so many columns, as the copy engine sees them: of (sequence, position, column)."""
    x = x_BSHD.flatten(2)
    if x.stride(1) % 8 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return block_descriptor(x, 1, 64, width)
