"""RMSNorm in Triton, alone and with the residual add before it: one pass over memory each way. Imported only where
Triton is.

N rows of width D. Backward loops over the rows with P persistent programs; each loads its next rows while it works on
these, and leaves a partial sum of the weight's gradient. Partial sums are added in the order of programs: no atomics,
the same bits every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import (
    load_as_fp32,
    load_or_zero,
    program_block,
    tile_mask,
    tile_pointers,
    wide_program_id,
)
from moefold.layout.gradient_sink import memory_for_gradient

WARPS = 4224  # of backward's programs: thirty-two for each multiprocessor of an H200, resident at once on 64 registers


class MatrixTile(NamedTuple):
    """A tile of a matrix: numbers of its rows and columns, and how many rows and columns the matrix has."""

    n: Any
    d: Any
    N: Any
    D: Any


@triton.jit
def load_rows(x_ND, tile):
    n, d, N, D = tile
    at = tile_pointers(x_ND, n, d, D)
    inside = tile_mask(n < N, d < D)
    return load_or_zero(at, inside)


@triton.jit
def store_rows(out_ND, value, tile):
    n, d, N, D = tile
    at = tile_pointers(out_ND, n, d, D)
    rounded = value.to(out_ND.dtype.element_ty)
    inside = tile_mask(n < N, d < D)
    tl.store(at, rounded, mask=inside)


@triton.jit
def load_inverse(inverse_N, n, N):
    """One over the root mean square of rows n, to be broadcast over them."""
    inverse = load_or_zero(inverse_N + n, n < N)
    return inverse[:, None]


@triton.jit
def rmsnorm_forward_kernel(x_ND, added_ND, w_D, sum_ND, y_ND, inverse_N, N, D, eps, ROWS: constexpr, WIDTH: constexpr):
    program = wide_program_id(0)
    n = program * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    tile = MatrixTile(n, d, N, D)
    x = load_rows(x_ND, tile)
    x = x.to(tl.float32)
    # residual add: the norm is of the rounded sum, as stored
    if added_ND is not None:
        added = load_rows(added_ND, tile)
        total = x + added.to(tl.float32)
        rounded = total.to(sum_ND.dtype.element_ty)
        store_rows(sum_ND, rounded, tile)
        x = rounded.to(tl.float32)
    # one over the root mean square of each row
    squares = x * x
    mean_square = tl.sum(squares, 1) / D
    inverse = tl.rsqrt(mean_square + eps)
    inside = n < N
    tl.store(inverse_N + n, inverse, mask=inside)
    # the norm, times the weight
    w = load_as_fp32(w_D + d, d < D)
    normed = x * inverse[:, None]
    y = normed * w[None, :]
    store_rows(y_ND, y, tile)


@triton.jit
def rmsnorm_backward_kernel(
    dy_ND, also_ND, x_ND, w_D, inverse_N, ds_ND, dx_ND, dw_PD, N, D, ROWS: constexpr, WIDTH: constexpr
):  # fmt: skip
    """The output's gradient is `dy_ND` plus `also_ND`; `ds_ND` is the gradient of the normed sum from its other uses.
    `also_ND` and `ds_ND` may be None."""
    d = tl.arange(0, WIDTH)
    dw = tl.zeros([WIDTH], tl.float32)
    # prologue: load the first rows
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    n = first + tl.arange(0, ROWS)
    n = n.to(tl.int64)
    first_tile = MatrixTile(n, d, N, D)
    dy = load_rows(dy_ND, first_tile)
    x = load_rows(x_ND, first_tile)
    if also_ND is not None:
        also = load_rows(also_ND, first_tile)
    if ds_ND is not None:
        ds = load_rows(ds_ND, first_tile)
    inverse = load_inverse(inverse_N, n, N)
    # main loop over this program's rows
    for _ in range(first, N, step):
        # prefetch the next rows
        ahead = n + step
        next_tile = MatrixTile(ahead, d, N, D)
        next_dy = load_rows(dy_ND, next_tile)
        next_x = load_rows(x_ND, next_tile)
        if also_ND is not None:
            next_also = load_rows(also_ND, next_tile)
        if ds_ND is not None:
            next_ds = load_rows(ds_ND, next_tile)
        next_inverse = load_inverse(inverse_N, ahead, N)
        # the normed rows, and the gradient of what became of them
        wide = x.to(tl.float32)
        unit = wide * inverse
        g = dy.to(tl.float32)
        if also_ND is not None:
            g += also.to(tl.float32)
            also = next_also
        # gradient of the weight
        summands = g * unit
        dw += tl.sum(summands, 0)
        # gradient of these rows
        w = load_as_fp32(w_D + d, d < D)  # again from the cache, to save registers
        g *= w[None, :]
        products = g * unit
        along = tl.sum(products, 1) / D
        across = g - unit * along[:, None]
        dx = across * inverse
        if ds_ND is not None:
            dx += ds.to(tl.float32)
            ds = next_ds
        tile = MatrixTile(n, d, N, D)
        store_rows(dx_ND, dx, tile)
        # the next rows are these rows now
        n = ahead
        dy = next_dy
        x = next_x
        inverse = next_inverse
    # epilogue: this program's summand of the weight's gradient
    program = wide_program_id(0)
    line = dw_PD + program * D
    inside = d < D
    tl.store(line + d, dw, mask=inside)


@triton.jit
def column_sums_kernel(x_PD, out_D, P, D, ROWS: constexpr, COLS: constexpr):
    d = program_block(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, P, ROWS):
        p = first + tl.arange(0, ROWS)
        tile = MatrixTile(p, d, P, D)
        total += load_rows(x_PD, tile)
    column = tl.sum(total, 0)
    rounded = column.to(out_D.dtype.element_ty)
    inside = d < D
    tl.store(out_D + d, rounded, mask=inside)


def weight_gradient(dw_PD: Tensor, weight: Tensor) -> Tensor:
    """The sum over programs, written where the weight's gradient belongs."""
    p, d = dw_PD.shape
    out = memory_for_gradient(weight)
    programs = triton.cdiv(d, 16)
    launch = column_sums_kernel[(programs,)]
    launch(dw_PD, out, p, d, 128, 16)
    return out


def rmsnorm_tile_shape(d: int, elements_per_thread: int) -> dict[str, int]:
    """Rows and columns of a tile, and its number of warps. Short rows share a tile."""
    width = triton.next_power_of_2(d)
    rows = max(1, 2048 // width)
    threads = rows * width // elements_per_thread
    warps = max(4, threads // 32)
    most_warps = 256 // elements_per_thread
    warps = min(most_warps, warps)
    return {"ROWS": rows, "WIDTH": width, "num_warps": warps}


def contiguous_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


SumNormInverse = tuple[Tensor, Tensor, Tensor]


def rmsnorm_forward(x: Tensor, added: Tensor | None, w_D: Tensor, eps: float) -> SumNormInverse:
    """(the sum, or x itself; its norm times the weight; one over its root mean square)."""
    d = x.shape[-1]
    n = x.numel() // d
    x = x.contiguous()
    added = contiguous_or_none(added)
    total = x if added is None else torch.empty_like(x)
    y = torch.empty_like(x)
    inverse_N = x.new_empty(n, dtype=torch.float32)
    tile = rmsnorm_tile_shape(d, 16)
    if n:
        programs = triton.cdiv(n, tile["ROWS"])
        launch = rmsnorm_forward_kernel[(programs,)]
        tensors = (x, added, w_D, total, y, inverse_N)
        launch(*tensors, n, d, eps, **tile)
    return total, y, inverse_N


def rmsnorm_backward(
    dy: Tensor,
    also: Tensor | None,
    x: Tensor,
    w_D: Tensor,
    inverse_N: Tensor,
    ds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight. The output's gradient is `dy`, plus `also` unless that is None."""
    d = x.shape[-1]
    n = x.numel() // d
    dy = dy.contiguous()
    also = contiguous_or_none(also)
    ds = contiguous_or_none(ds)
    dx = torch.empty_like(x)
    tile = rmsnorm_tile_shape(d, 8)
    resident = max(1, WARPS // tile["num_warps"])
    blocks = triton.cdiv(n, tile["ROWS"])
    programs = min(resident, blocks)
    dw_PD = x.new_empty(programs, d, dtype=torch.float32)
    if n:
        tensors = (dy, also, x, w_D, inverse_N, ds, dx, dw_PD)
        launch = rmsnorm_backward_kernel[(programs,)]
        launch(*tensors, n, d, **tile, maxnreg=64)
    return dx, weight_gradient(dw_PD, w_D)
