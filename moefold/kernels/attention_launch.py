"""The launches of attention's backward on Hopper. Imported only where Triton is.

B sequences, S positions, H query heads, G key/value heads, D head width; T tiles of 64 queries, an even number of them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.attention_hopper import keys_kernel, queries_kernel

WIDTHS = (64, 128)
MOST_BYTES = 4 << 30  # of dS^T at a time
STAGES = {64: (4, 4), 128: (3, 4)}  # tiles on their way, for keys and for queries
GL_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@triton.jit
def statistics_kernel(
    y, dy, lse, statistics, S, H, T, scale, y_b, y_s, y_h, d_b, d_s, d_h, D: tl.constexpr
):  # fmt: skip
    """Of 64 queries, what their scores and dP begin with: minus log-sum-exp, unscaled, and minus the sum of the result
    times its gradient. Behind the end the former is minus infinity: such queries see nothing."""
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows, columns = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, D)
    inside = rows < S
    result = tl.load(y + b * y_b + h * y_h + rows[:, None] * y_s + columns, mask=inside[:, None], other=0.0)
    grads = tl.load(dy + b * d_b + h * d_h + rows[:, None] * d_s + columns, mask=inside[:, None], other=0.0)
    head = tl.program_id(1).to(tl.int64)
    sums = tl.load(lse + head * S + rows, mask=inside, other=float("inf"))
    here = statistics + (head * T + tl.program_id(0)) * 128 + tl.arange(0, 64)
    tl.store(here, -sums / scale)
    tl.store(here + 64, -tl.sum(result.to(tl.float32) * grads.to(tl.float32), 1))


def units_at_once(s: int, units: int, group: int) -> int:
    """How many key/value heads can go together, as evenly as possible; none if one has too much dS^T."""
    blocks = triton.cdiv(s, 128)
    of_unit = group * blocks * (blocks + 1) * 128 * 64 * 2
    most = MOST_BYTES // of_unit
    return triton.cdiv(units, triton.cdiv(units, most)) if most else 0


def hopper_attends(q: torch.Tensor, k: torch.Tensor, scale: float) -> bool:
    """Whether the kernels for Hopper can do it and do it faster."""
    (b, s, h, d), g = q.shape, k.shape[2]
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9 or scale <= 0:
        return False
    return d in WIDTHS and q.dtype in GL_TYPES and units_at_once(s, b * g, h // g) > 0


def hopper_backward(
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
    group, units, blocks = h // g, b * g, triton.cdiv(s, 128)
    tiles = 2 * blocks
    statistics = torch.empty(b * h, tiles, 2, 64, dtype=torch.float32, device=q.device)
    statistics_kernel[tiles, b * h](
        y, dy, lse_BHS.contiguous(), statistics, s, h, tiles, scale, *y.stride()[:3], *dy.stride()[:3], d
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    together = units_at_once(s, units, group)
    ds = torch.empty(together * group * blocks * (blocks + 1) * 128, 64, dtype=q.dtype, device=q.device)
    ds_block, keys = block(ds, 64, 64), heads(k, d)
    inputs = (heads(q, d), keys, heads(v, d), heads(dy, d), heads(dk, d), heads(dv, d), ds_block, statistics)
    for_keys, for_queries = STAGES[d]
    for unit in range(0, units, together):
        here = min(together, units - unit)
        how = {"D": d, "num_warps": 4}
        keys_kernel[here * blocks,](
            *inputs, unit, here, tiles, h, group, triton.cdiv(256, blocks), scale, STAGES=for_keys, **how
        )
        rows = triton.cdiv(blocks, 2)
        queries_kernel[here * group * rows,](
            keys, ds_block, heads(dq, 64), unit, here * group, tiles, h, group, triton.cdiv(256, rows), scale,
            STAGES=for_queries, **how,
        )  # fmt: skip
    return dq, dk, dv


def heads(x_BSHD: torch.Tensor, width: int) -> TensorDescriptor:
    """64 positions of a head, or of a part of it, as the copy engine sees them: (sequence, position, column)."""
    x = x_BSHD.flatten(2)
    if x.stride(2) != 1 or x.stride(1) % 8 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return block(x, 1, 64, width)


def block(x: torch.Tensor, *shape: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), GL_TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape), layout)
