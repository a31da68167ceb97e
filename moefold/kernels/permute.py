"""Tokens to rows and back, without atomics: each direction is a gather, and each is the other's backward.

N source rows, R rows in expert order, D width, K rows at most per source row.
`index_R[r]` is the source of row r; `slots_NK[n]` are the rows made from source n. The two say the same thing.

    source_ND  --gather_rows-->  x_RD = source[index]         sum_rows: y_ND = sum_k y_R[slots[:, k]]
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def gather_rows(source_ND: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
    """x_RD[r] = source_ND[index_R[r]]."""
    return source_ND[index_R]


@op
def sum_rows(y_RD: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
    """out_ND[n] = the sum of y_RD over the rows made from n, in fp32 or better."""
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    return y_RD[slots_NK].sum(1, dtype=wide).to(y_RD.dtype)


@gather_rows.fast("adjoint")
def _(source_ND: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
    return Gather.apply(source_ND, index_R, slots_NK)  # pyright: ignore[reportReturnType]


@sum_rows.fast("adjoint")
def _(y_RD: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
    return Sum.apply(y_RD, index_R, slots_NK)  # pyright: ignore[reportReturnType]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source_ND, index_R, slots_NK):
        ctx.save_for_backward(index_R, slots_NK)
        return gather_rows.reference(source_ND, index_R, slots_NK)

    @staticmethod
    def backward(ctx, d_RD):
        return sum_rows.reference(d_RD, *ctx.saved_tensors), None, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, index_R, slots_NK):
        ctx.save_for_backward(index_R, slots_NK)
        return sum_rows.reference(y_RD, index_R, slots_NK)

    @staticmethod
    def backward(ctx, d_ND):
        return gather_rows.reference(d_ND, *ctx.saved_tensors), None, None


def shuffled(n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A random index and its slots."""
    order = torch.randperm(n * k, generator=torch.Generator().manual_seed(n * k))
    slots = torch.empty_like(order)
    slots[order] = torch.arange(n * k)
    return (order // max(k, 1)).to(device), slots.view(n, k).to(device)


@gather_rows.cases
def _(device: str, dtype: torch.dtype):
    for n, k, d in [(1, 1, 4), (33, 2, 16), (64, 8, 32), (0, 2, 8)]:
        yield Case(f"{n} x {k} rows of {d}", (random(device, dtype, n, d), *shuffled(n, k, device)))


@sum_rows.cases
def _(device: str, dtype: torch.dtype):
    for n, k, d in [(1, 1, 4), (33, 2, 16), (64, 8, 32), (0, 2, 8)]:
        yield Case(f"{n} x {k} rows of {d}", (random(device, dtype, n * k, d), *shuffled(n, k, device)))
