"""Tokens to rows and back, without atomics: each direction is a gather, and each is the other's backward.

N source rows, R rows in expert order, D width, K rows at most per source row.
`index_R[r]` is the source of row r; `slots_NK[n]` are the rows made from source n. The two say the same thing. Only
with `holes` may either hold -1: a slot without a row (fewer than K), a row without a source (padding).

    source_ND  --gather_rows-->  x_RD = source[index]         sum_rows: y_ND = sum_k y_R[slots[:, k]]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def gather_rows(
    source_ND: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False
) -> torch.Tensor:
    """x_RD[r] = source_ND[index_R[r]]; zeros for a row of padding, -1."""
    if holes:
        source_ND = torch.cat((source_ND, source_ND.new_zeros(1, source_ND.shape[1])))
    return source_ND[index_R]


@register_op
def sum_rows(y_RD: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False) -> torch.Tensor:
    """out_ND[n] = the sum of y_RD over the rows made from n, in fp32 or better."""
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    if holes:  # -1 finds the row of zeros behind the last
        y_RD = torch.cat((y_RD, y_RD.new_zeros(1, y_RD.shape[1])))
    return y_RD[slots_NK].sum(1, dtype=wide).to(y_RD.dtype)


@gather_rows.register_fast("adjoint")
def _(source_ND: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False) -> torch.Tensor:
    return GatherRowsFunction.apply(source_ND, index_R, slots_NK, holes, gather_rows, sum_rows)  # pyright: ignore[reportReturnType]


@sum_rows.register_fast("adjoint")
def _(y_RD: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False) -> torch.Tensor:
    return SumRowsFunction.apply(y_RD, index_R, slots_NK, holes, gather_rows, sum_rows)  # pyright: ignore[reportReturnType]


@gather_rows.register_fast("triton")
def _(source_ND: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False) -> torch.Tensor:
    return GatherRowsFunction.apply(source_ND, index_R, slots_NK, holes, *one_pass_movements())  # pyright: ignore[reportReturnType]


@sum_rows.register_fast("triton")
def _(y_RD: torch.Tensor, index_R: torch.Tensor, slots_NK: torch.Tensor, holes: bool = False) -> torch.Tensor:
    return SumRowsFunction.apply(y_RD, index_R, slots_NK, holes, *one_pass_movements())  # pyright: ignore[reportReturnType]


RowMovement = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def one_pass_movements() -> tuple[RowMovement, RowMovement]:
    """Both ways in one pass each, without a copy that repeats rows: torch's own sum writes K rows per token first."""
    from moefold.kernels.routing import rows_triton

    return (
        lambda source, index, slots, holes: rows_triton.gather_by_index(source, index),
        lambda y, index, slots, holes: rows_triton.sum_over_slots(y, slots),
    )


class GatherRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source_ND, index_R, slots_NK, holes, gather: RowMovement, total: RowMovement):
        ctx.save_for_backward(index_R, slots_NK)
        ctx.holes, ctx.total = holes, total
        return gather(source_ND, index_R, slots_NK, holes)

    @staticmethod
    def backward(ctx, d_RD):
        return ctx.total(d_RD, *ctx.saved_tensors, ctx.holes), None, None, None, None, None


class SumRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, index_R, slots_NK, holes, gather: RowMovement, total: RowMovement):
        ctx.save_for_backward(index_R, slots_NK)
        ctx.holes, ctx.gather = holes, gather
        return total(y_RD, index_R, slots_NK, holes)

    @staticmethod
    def backward(ctx, d_ND):
        return ctx.gather(d_ND, *ctx.saved_tensors, ctx.holes), None, None, None, None, None


def shuffled_rows(n: int, k: int, device: str, drop: int = 0) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """A random index and its slots; with `drop`, every so many-th row is left out and three rows of padding are put in
    front."""
    kept = torch.randperm(n * k, generator=torch.Generator().manual_seed(n * k))
    kept = kept[kept % drop != 0] if drop else kept
    padding = kept.new_full((3 if drop else 0,), -1)
    slots = torch.full((n * k,), -1)
    slots[kept] = torch.arange(len(kept)) + len(padding)
    return torch.cat((padding, kept // max(k, 1))).to(device), slots.view(n, k).to(device), drop > 0


ROW_CASE_SIZES = [
    (1, 1, 4, 0),
    (33, 2, 16, 0),
    (64, 8, 32, 0),
    (0, 2, 8, 0),
    (33, 2, 16, 3),
    (16, 4, 8, 2),
    (5, 1, 8, 1),
]


@gather_rows.register_cases
def _(device: str, dtype: torch.dtype):
    for n, k, d, drop in ROW_CASE_SIZES:
        yield KernelCase(
            f"{n} x {k} rows of {d}, drop {drop}",
            (seeded_randn(device, dtype, n, d), *shuffled_rows(n, k, device, drop)),
        )


@sum_rows.register_cases
def _(device: str, dtype: torch.dtype):
    for n, k, d, drop in ROW_CASE_SIZES:
        index, slots, holes = shuffled_rows(n, k, device, drop)
        yield KernelCase(
            f"{n} x {k} rows of {d}, drop {drop}", (seeded_randn(device, dtype, len(index), d), index, slots, holes)
        )
