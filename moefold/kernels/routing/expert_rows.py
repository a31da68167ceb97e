"""Expert rows: their order from every token's choices, tokens to rows, and rows back to tokens, without atomics.

    arrange_rows   ids_NK -> index_R, slots_NK, weight_R, ends_E
    gather_rows    source_ND -> x_RD = source[index]
    sum_rows       y_RD -> y_ND = sum_k y_R[slots[:, k]]

N source rows, R rows in expert order, D width, K rows at most per source row, E experts. Within an expert, rows keep
the order of their sources. `index_R[r]` is the source of row r; `slots_NK[n]` are the rows made from source n: each is
the inverse of the other, and gather and sum are each the other's backward. Only with `holes` may either hold -1: a slot
without a row (fewer than K), a row without a source (padding, or rows behind the last expert's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op, seeded_randn

ArrangedRows = tuple[Tensor, Tensor, Tensor, Tensor]  # index_R, slots_NK, weight_R, ends_E


@register_op
def arrange_rows(ids_NK: Tensor, weights_NK: Tensor, experts: int) -> ArrangedRows:
    """index_R, slots_NK (its inverse), weight_R, and the end of each expert's rows; integers are int32."""
    ids = ids_NK.flatten()
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    expert_E = torch.arange(experts, device=ids.device)
    ends_E = torch.searchsorted(sorted_ids, expert_E, right=True)
    row_R = torch.arange(len(order), device=order.device)
    slots = torch.empty_like(order)
    slots.scatter_(0, order, row_R)
    slots_NK = slots.view(ids_NK.shape)
    choices = max(ids_NK.shape[1], 1)
    index_R = order // choices
    weight_R = weights_NK.flatten()[order]
    return index_R.int(), slots_NK.int(), weight_R, ends_E.int()


@arrange_rows.register_fast("triton")
def arrange_rows_triton(ids_NK: Tensor, weights_NK: Tensor, experts: int) -> ArrangedRows:
    return ArrangeRowsFunction.apply(ids_NK, weights_NK, experts)  # pyright: ignore[reportReturnType]


class ArrangeRowsFunction(torch.autograd.Function):
    """Only the weights have a gradient: a gather through the slots."""

    @staticmethod
    def forward(ctx, ids_NK, weights_NK, experts):
        from moefold.kernels.routing.router_triton import launch_arrange_rows

        index_R, slots_NK, weight_R, ends_E = launch_arrange_rows(ids_NK, weights_NK, experts)
        ctx.save_for_backward(slots_NK)
        ctx.mark_non_differentiable(index_R, slots_NK, ends_E)
        ctx.set_materialize_grads(False)
        return index_R, slots_NK, weight_R, ends_E

    @staticmethod
    def backward(ctx, _index, _slots, dweight_R, _ends):
        (slots_NK,) = ctx.saved_tensors
        if dweight_R is None:
            return None, None, None
        slots = slots_NK.flatten()
        dweights = dweight_R.index_select(0, slots)  # index_select takes int32 indices
        dweights_NK = dweights.view(slots_NK.shape)
        return None, dweights_NK, None


ARRANGE_CASE_SIZES = [  # N, K, E
    (1, 1, 2),
    (33, 2, 8),
    (0, 2, 4),
    (200, 8, 128),
    (700, 1, 3),
]


@arrange_rows.register_cases
def arrange_rows_cases(draw: CaseInputs) -> Cases:
    for n, k, e in ARRANGE_CASE_SIZES:
        scores = seeded_randn("cpu", torch.float64, n, e)
        order = scores.argsort(1)
        spread = order[:, :k].to(draw.device)
        one_expert = torch.full_like(spread, e - 1)
        weights = draw.wide(n, k, seed=1)
        name = f"{n} x {k} to {e}"
        yield KernelCase(f"{name}, spread", (spread, weights, e))
        yield KernelCase(f"{name}, one expert", (one_expert, weights, e))


@register_op
def gather_rows(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    """x_RD[r] = source_ND[index_R[r]]; zeros where the index is -1."""
    if holes:
        source_ND = with_row_of_zeros(source_ND)
    return source_ND[index_R]


@register_op
def sum_rows(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    """out_ND[n] = the sum of y_RD over the rows made from n, in fp32 or better."""
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    if holes:
        y_RD = with_row_of_zeros(y_RD)
    rows_NKD = y_RD[slots_NK]
    sum_ND = rows_NKD.sum(1, dtype=wide)
    return sum_ND.to(y_RD.dtype)


def with_row_of_zeros(x: Tensor) -> Tensor:
    """A last row of zeros, which the index -1 reads."""
    zeros = x.new_zeros(1, x.shape[1])
    return torch.cat((x, zeros))


@gather_rows.register_fast("gather_backward")
def gather_rows_gather_backward(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowOrder(index_R, slots_NK, holes)
    return move_rows(source_ND, rows, gather_rows.reference, sum_rows.reference)


@sum_rows.register_fast("gather_backward")
def sum_rows_gather_backward(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowOrder(index_R, slots_NK, holes)
    return move_rows(y_RD, rows, sum_rows.reference, gather_rows.reference)


@gather_rows.register_fast("triton")
def gather_rows_triton(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowOrder(index_R, slots_NK, holes)
    return move_rows(source_ND, rows, gather_in_one_pass, sum_in_one_pass)


@sum_rows.register_fast("triton")
def sum_rows_triton(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowOrder(index_R, slots_NK, holes)
    return move_rows(y_RD, rows, sum_in_one_pass, gather_in_one_pass)


RowMovement = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class RowOrder(NamedTuple):
    """Where rows come from and go to, and whether either may hold -1."""

    index_R: Tensor
    slots_NK: Tensor
    holes: bool


def move_rows(x: Tensor, rows: RowOrder, move: RowMovement, move_back: RowMovement) -> Tensor:
    return MoveRowsFunction.apply(x, *rows, move, move_back)  # pyright: ignore[reportReturnType]


def gather_in_one_pass(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool) -> Tensor:
    from moefold.kernels.routing.rows_triton import gather_by_index

    return gather_by_index(source_ND, index_R)


def sum_in_one_pass(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool) -> Tensor:
    """Reads each row once; torch's own sum writes K rows per token first."""
    from moefold.kernels.routing.rows_triton import sum_over_slots

    return sum_over_slots(y_RD, slots_NK)


class MoveRowsFunction(torch.autograd.Function):
    """Gather or sum of rows: the backward of each is the other."""

    @staticmethod
    def forward(ctx, x, index_R, slots_NK, holes, move: RowMovement, move_back: RowMovement):
        ctx.save_for_backward(index_R, slots_NK)
        ctx.holes = holes
        ctx.move_back = move_back
        return move(x, index_R, slots_NK, holes)

    @staticmethod
    def backward(ctx, d):
        index_R, slots_NK = ctx.saved_tensors
        moved_back = ctx.move_back(d, index_R, slots_NK, ctx.holes)
        return moved_back, None, None, None, None, None


def shuffled_rows(n: int, k: int, device: str, drop: int = 0) -> RowOrder:
    """A random index, its slots and whether there are holes. With `drop`, every drop-th row is left out and three rows
    of padding come first."""
    generator = torch.Generator().manual_seed(n * k)
    choices = torch.randperm(n * k, generator=generator)
    padding = 0
    if drop:
        kept = choices % drop != 0
        choices = choices[kept]
        padding = 3
    sources = choices // max(k, 1)
    index = F.pad(sources, (padding, 0), value=-1)
    slots = torch.full((n * k,), -1)
    slots[choices] = torch.arange(len(choices)) + padding
    slots_NK = slots.view(n, k)
    return RowOrder(index.to(device), slots_NK.to(device), drop > 0)


ROW_CASE_SIZES = [  # N, K, D, drop, undefined rows behind the last
    (1, 1, 4, 0, 0),
    (33, 2, 16, 0, 0),
    (64, 8, 32, 0, 0),
    (0, 2, 8, 0, 0),
    (33, 2, 16, 3, 0),
    (16, 4, 8, 2, 0),
    (5, 1, 8, 1, 0),
    (33, 2, 16, 3, 5),
]


class RowCase(NamedTuple):
    """A case of rows: name, width, the rows, and (defined rows, rows)."""

    name: str
    width: int
    order: RowOrder
    rows: tuple[int, int]


def row_cases(device: str) -> Iterator[RowCase]:
    for n, k, d, drop, spare in ROW_CASE_SIZES:
        order = shuffled_rows(n, k, device, drop)
        defined = len(order.index_R)
        index_R = F.pad(order.index_R, (0, spare), value=-1)
        name = f"{n} x {k} rows of {d}, drop {drop}"
        if spare:
            name += f", {spare} undefined behind them"
        order = order._replace(index_R=index_R)
        yield RowCase(name, d, order, (defined, defined + spare))


@gather_rows.register_cases
def gather_rows_cases(draw: CaseInputs) -> Cases:
    for case in row_cases(draw.device):
        sources = len(case.order.slots_NK)
        source_ND = draw.normal(sources, case.width)
        yield KernelCase(case.name, (source_ND, *case.order), rows=case.rows)


@sum_rows.register_cases
def sum_rows_cases(draw: CaseInputs) -> Cases:
    for case in row_cases(draw.device):
        rows = len(case.order.index_R)
        y_RD = draw.normal(rows, case.width)
        yield KernelCase(case.name, (y_RD, *case.order), rows=case.rows)
