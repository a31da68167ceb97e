"""RMSNorm, alone and with what is added before it, in Triton: one pass over memory each way. Imported only where Triton
is.

N rows of width D. Backward walks over the rows with a fixed number of programs; each leaves its sum for the weight's
gradient, and these are added in the order of programs: no atomics, the same bits every run.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 1056  # eight for each multiprocessor of an H200


@triton.jit
def forward_kernel(
    x_ND, added_ND, w_D, sum_ND, y_ND, inverse_N, N, D, eps, ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at, there = n[:, None] * D + d[None, :], (n < N)[:, None] & (d < D)[None, :]
    x = tl.load(x_ND + at, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (x + tl.load(added_ND + at, mask=there, other=0.0).to(tl.float32)).to(sum_ND.dtype.element_ty)
        tl.store(sum_ND + at, rounded, mask=there)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ND + at, (x * inverse[:, None] * w[None, :]).to(y_ND.dtype.element_ty), mask=there)
    tl.store(inverse_N + n, inverse, mask=n < N)


@triton.jit
def backward_kernel(
    dy_ND, x_ND, w_D, inverse_N, ds_ND, dx_ND, dw_PD, N, D,
    ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`ds_ND` is what the sum that was normed gets from elsewhere."""
    d = tl.arange(0, WIDTH)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([WIDTH], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        n = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at, there = n[:, None] * D + d[None, :], (n < N)[:, None] & (d < D)[None, :]
        inverse = tl.load(inverse_N + n, mask=n < N, other=0.0)[:, None]
        dy = tl.load(dy_ND + at, mask=there, other=0.0).to(tl.float32)
        unit = tl.load(x_ND + at, mask=there, other=0.0).to(tl.float32) * inverse
        g = dy * w[None, :]
        dx = (g - unit * (tl.sum(g * unit, 1) / D)[:, None]) * inverse
        if ADDS:
            dx += tl.load(ds_ND + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dx_ND + at, dx.to(dx_ND.dtype.element_ty), mask=there)
        dw += tl.sum(dy * unit, 0)
    tl.store(dw_PD + tl.program_id(0).to(tl.int64) * D + d, dw, mask=d < D)


def shape_of(d: int) -> dict[str, int]:
    """Rows and columns of a tile, and warps for it: rows that are short are taken together."""
    width = triton.next_power_of_2(d)
    rows = max(1, 2048 // width)
    return {"ROWS": rows, "WIDTH": width, "num_warps": min(16, max(4, rows * width // 512))}


def forward(x: torch.Tensor, added: torch.Tensor | None, w_D: torch.Tensor, eps: float):
    """(the sum, or x itself; its norm times the weight; one over its root mean square)."""
    d = x.shape[-1]
    x, n = x.contiguous(), x.numel() // d
    added = None if added is None else added.contiguous()
    total = x if added is None else torch.empty_like(x)
    y, inverse_N = torch.empty_like(x), torch.empty(n, dtype=torch.float32, device=x.device)
    shape = shape_of(d)
    if n:
        forward_kernel[(triton.cdiv(n, shape["ROWS"]),)](
            x, added, w_D, total, y, inverse_N, n, d, eps, ADDS=added is not None, **shape
        )
    return total, y, inverse_N


def backward(dy: torch.Tensor, x: torch.Tensor, w_D: torch.Tensor, inverse_N: torch.Tensor, ds: torch.Tensor | None):
    """(gradient of x, of the weight)."""
    d = x.shape[-1]
    dy, n = dy.contiguous(), x.numel() // d
    ds = None if ds is None else ds.contiguous()
    dx, shape = torch.empty_like(x), shape_of(d)
    dw_PD = torch.zeros(min(PROGRAMS, triton.cdiv(n, shape["ROWS"])), d, dtype=torch.float32, device=x.device)
    if n:
        backward_kernel[(len(dw_PD),)](dy, x, w_D, inverse_N, ds, dx, dw_PD, n, d, ADDS=ds is not None, **shape)
    return dx, dw_PD.sum(0).to(w_D.dtype)
