"""RMSNorm, alone and with what is added before it, in Triton: one pass over memory each way. Imported only where Triton
is.

N rows of width D. Backward walks over the rows with P programs, as many as run at once, each loading its next rows
while it works on these; each leaves its sum for the weight's gradient, and these are added in the order of programs: no
atomics, the same bits every run.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.layout.gradient_sink import memory_for_gradient

WARPS = 4224  # of backward's programs: thirty-two for each multiprocessor of an H200, which run at once on 64 registers


@triton.jit
def load_rows(x_ND, n, d, N, D):
    return tl.load(x_ND + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def rmsnorm_forward_kernel(
    x_ND, added_ND, w_D, sum_ND, y_ND, inverse_N, N, D, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at, there = n[:, None] * D + d[None, :], (n < N)[:, None] & (d < D)[None, :]
    x = tl.load(x_ND + at, mask=there, other=0.0).to(tl.float32)
    if added_ND is not None:
        rounded = (x + tl.load(added_ND + at, mask=there, other=0.0).to(tl.float32)).to(sum_ND.dtype.element_ty)
        tl.store(sum_ND + at, rounded, mask=there)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_ND + at, (x * inverse[:, None] * w[None, :]).to(y_ND.dtype.element_ty), mask=there)
    tl.store(inverse_N + n, inverse, mask=n < N)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ND, also_ND, x_ND, w_D, inverse_N, ds_ND, dx_ND, dw_PD, N, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradient of what came out is `dy_ND`, or the sum of it and `also_ND`; `ds_ND` is what the sum that was normed
    gets from elsewhere. Either may be None."""
    d = tl.arange(0, WIDTH)
    dw = tl.zeros([WIDTH], tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    n = (first + tl.arange(0, ROWS)).to(tl.int64)
    dy, x = load_rows(dy_ND, n, d, N, D), load_rows(x_ND, n, d, N, D)
    if also_ND is not None:
        also = load_rows(also_ND, n, d, N, D)
    if ds_ND is not None:
        ds = load_rows(ds_ND, n, d, N, D)
    inverse = tl.load(inverse_N + n, mask=n < N, other=0.0)[:, None]
    for _ in range(first, N, step):
        ahead = n + step
        next_dy, next_x = load_rows(dy_ND, ahead, d, N, D), load_rows(x_ND, ahead, d, N, D)
        if also_ND is not None:
            next_also = load_rows(also_ND, ahead, d, N, D)
        if ds_ND is not None:
            next_ds = load_rows(ds_ND, ahead, d, N, D)
        next_inverse = tl.load(inverse_N + ahead, mask=ahead < N, other=0.0)[:, None]
        unit, g = x.to(tl.float32) * inverse, dy.to(tl.float32)
        if also_ND is not None:
            g += also.to(tl.float32)
            also = next_also
        dw += tl.sum(g * unit, 0)
        g *= tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]  # from the cache: registers are dearer
        dx = (g - unit * (tl.sum(g * unit, 1) / D)[:, None]) * inverse
        if ds_ND is not None:
            dx += ds.to(tl.float32)
            ds = next_ds
        there = (n < N)[:, None] & (d < D)[None, :]
        tl.store(dx_ND + n[:, None] * D + d[None, :], dx.to(dx_ND.dtype.element_ty), mask=there)
        n, dy, x, inverse = ahead, next_dy, next_x, next_inverse
    tl.store(dw_PD + tl.program_id(0).to(tl.int64) * D + d, dw, mask=d < D)


@triton.jit
def column_sums_kernel(x_PD, out_D, P, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    d = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, P, ROWS):
        total += load_rows(x_PD, first + tl.arange(0, ROWS), d, P, D)
    tl.store(out_D + d, tl.sum(total, 0).to(out_D.dtype.element_ty), mask=d < D)


def weight_gradient(dw_PD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum of what programs left, where the weight's gradient shall be."""
    (p, d), out = dw_PD.shape, memory_for_gradient(weight)
    column_sums_kernel[(triton.cdiv(d, 16),)](dw_PD, out, p, d, 128, 16)
    return out


def rmsnorm_tile_shape(d: int, each: int) -> dict[str, int]:
    """Rows and columns of a tile, and warps for it with so many elements a thread: short rows are taken together."""
    width = triton.next_power_of_2(d)
    rows = max(1, 2048 // width)
    return {"ROWS": rows, "WIDTH": width, "num_warps": min(256 // each, max(4, rows * width // (32 * each)))}


def rmsnorm_forward(x: torch.Tensor, added: torch.Tensor | None, w_D: torch.Tensor, eps: float):
    """(the sum, or x itself; its norm times the weight; one over its root mean square)."""
    d = x.shape[-1]
    x, n = x.contiguous(), x.numel() // d
    added = None if added is None else added.contiguous()
    total = x if added is None else torch.empty_like(x)
    y, inverse_N = torch.empty_like(x), torch.empty(n, dtype=torch.float32, device=x.device)
    shape = rmsnorm_tile_shape(d, 16)
    if n:
        rmsnorm_forward_kernel[(triton.cdiv(n, shape["ROWS"]),)](x, added, w_D, total, y, inverse_N, n, d, eps, **shape)
    return total, y, inverse_N


def rmsnorm_backward(dy, also, x: torch.Tensor, w_D: torch.Tensor, inverse_N: torch.Tensor, ds) -> tuple:
    """(gradient of x, of the weight). What came out has the gradient `dy`, plus `also` unless that is None."""
    d = x.shape[-1]
    n = x.numel() // d
    dy, also, ds = (None if each is None else each.contiguous() for each in (dy, also, ds))
    dx, shape = torch.empty_like(x), rmsnorm_tile_shape(d, 8)
    programs = min(max(1, WARPS // shape["num_warps"]), triton.cdiv(n, shape["ROWS"]))
    dw_PD = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    if n:
        rmsnorm_backward_kernel[(programs,)](dy, also, x, w_D, inverse_N, ds, dx, dw_PD, n, d, **shape, maxnreg=64)
    return dx, weight_gradient(dw_PD, w_D)
