"""Expert rows: their order from every token's choices, tokens to rows, and rows back to tokens, without atomics.

    arrange_rows   ids_NK -> index_R, slots_NK, weight_R, ends_E
    gather_rows    source_ND -> x_RD = source[index]
    spread_rows    the same, read by source, and only as far as rows are defined
    sum_rows       y_RD -> y_ND = sum_k y_R[slots[:, k]]

N source rows, R rows in expert order, D width, K rows at most per source row, E experts. Within an expert, rows keep
the order of their sources. `index_R[r]` is the source of row r; `slots_NK[n]` are the rows made from source n: each is
the inverse of the other, and gather and sum are each the other's backward. Only with `holes` may either hold -1: a slot
without a row (fewer than K), a row without a source (padding, or rows behind the last expert's).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op, register_op, seeded_randn
from moefold.kernels.routing.gathered_rows import GatheredRows, RowLinks, RowMovement, SummedRows

ArrangedRows = tuple[Tensor, Tensor, Tensor, Tensor]  # index_R, slots_NK, weight_R, ends_E


@register_op
def arrange_rows(ids_NK: Tensor, weights_NK: Tensor, experts: int) -> ArrangedRows:
    """index_R, slots_NK (its inverse), weight_R, and the end of each expert's rows; integers are int32."""
    ids = ids_NK.flatten()
    device = ids.device
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    expert_E = torch.arange(experts, device=device)
    ends_E = torch.searchsorted(sorted_ids, expert_E, right=True)
    # the row of each choice
    row_R = torch.arange(len(order), device=device)
    slots = torch.empty_like(order)
    slots.scatter_(0, order, row_R)
    slots_NK = slots.view(ids_NK.shape)
    # the source of each row
    choices = max(ids_NK.shape[1], 1)
    index_R = order // choices
    weights = weights_NK.flatten()
    weight_R = weights[order]
    index_R = index_R.int()
    slots_NK = slots_NK.int()
    ends_E = ends_E.int()
    return index_R, slots_NK, weight_R, ends_E


@arrange_rows.register_fast("triton")
def arrange_rows_triton(ids_NK: Tensor, weights_NK: Tensor, experts: int) -> ArrangedRows:
    return ArrangeRowsFunction.apply(ids_NK, weights_NK, experts)  # pyright: ignore[reportReturnType]


class ArrangeRowsFunction(torch.autograd.Function):
    """Only the weights have a gradient: a gather through the slots."""

    @staticmethod
    def forward(ctx, ids_NK, weights_NK, experts):
        from moefold.kernels.routing.router_triton import launch_arrange_rows

        arranged = launch_arrange_rows(ids_NK, weights_NK, experts)
        index_R, slots_NK, _, ends_E = arranged
        ctx.save_for_backward(slots_NK)
        ctx.mark_non_differentiable(index_R, slots_NK, ends_E)
        ctx.set_materialize_grads(False)
        return arranged

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
        dtype = torch.float64
        scores = seeded_randn("cpu", dtype, n, e)
        order = scores.argsort(1)
        first_k = order[:, :k]
        spread = first_k.to(draw.device)
        last = e - 1
        one_expert = torch.full_like(spread, last)
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


@register_inner_op
def spread_rows(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, ends_E: Tensor) -> Tensor:
    """x_RD[r] = source_ND[index_R[r]]; zeros where the index is -1. Rows behind the last end are undefined."""
    return gather_rows.reference(source_ND, index_R, slots_NK, True)


@spread_rows.register_fast("triton")
def spread_rows_triton(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, ends_E: Tensor) -> Tensor:
    from moefold.kernels.routing.rows_triton import spread_over_slots

    return spread_over_slots(source_ND, index_R, slots_NK, ends_E)


@register_op
def sum_rows(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    """out_ND[n] = the sum of y_RD over the rows made from n, in fp32 or better."""
    return sum_over_row_slots(y_RD, slots_NK, holes)


def sum_over_row_slots(y_RD: Tensor, slots_NK: Tensor, holes: bool) -> Tensor:
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    if holes:
        y_RD = with_row_of_zeros(y_RD)
    rows_NKD = y_RD[slots_NK]
    sum_ND = rows_NKD.sum(1, dtype=wide)
    return sum_ND.to(y_RD.dtype)


def with_row_of_zeros(x: Tensor) -> Tensor:
    """A last row of zeros, which the index -1 reads."""
    width = x.shape[1]
    zeros = x.new_zeros(1, width)
    return torch.cat((x, zeros))


@gather_rows.register_fast("gather_backward")
def gather_rows_gather_backward(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowLinks(index_R, slots_NK, holes)
    return gather_and_sum_later(source_ND, rows, PLAIN_GATHER)


@sum_rows.register_fast("gather_backward")
def sum_rows_gather_backward(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowLinks(index_R, slots_NK, holes)
    return sum_or_gather_later(y_RD, rows, PLAIN_SUM)


@gather_rows.register_fast("triton")
def gather_rows_triton(source_ND: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowLinks(index_R, slots_NK, holes)
    return gather_and_sum_later(source_ND, rows, ONE_PASS_GATHER)


@sum_rows.register_fast("triton")
def sum_rows_triton(y_RD: Tensor, index_R: Tensor, slots_NK: Tensor, holes: bool = False) -> Tensor:
    rows = RowLinks(index_R, slots_NK, holes)
    return sum_or_gather_later(y_RD, rows, ONE_PASS_SUM)


class RowMove(NamedTuple):
    """A gather or a sum of rows. The backward of each is the other."""

    forward: RowMovement
    backward: RowMovement


def move_rows(x: Tensor, rows: RowLinks, move: RowMove) -> Tensor:
    return MoveRowsFunction.apply(x, *rows, move)  # pyright: ignore[reportReturnType]


def take_gradient_ungathered(y_RD: Tensor) -> None:
    """Declare that the backward of the op that made y_RD reads the source of gathered rows."""
    y_RD.takes_ungathered = True  # pyright: ignore[reportAttributeAccessIssue]


def takes_gradient_ungathered(y_RD: Tensor) -> bool:
    return getattr(y_RD, "takes_ungathered", False)


def sum_or_gather_later(y_RD: Tensor, rows: RowLinks, move: RowMove) -> Tensor:
    """The sum, whose backward leaves the gather to the op that made y_RD where that op asks for it."""
    if takes_gradient_ungathered(y_RD):
        gather_later = partial(GatheredRows, gather=move.backward)
        move = move._replace(backward=gather_later)
    return move_rows(y_RD, rows, move)


def take_gradient_unsummed(x_ND: Tensor) -> None:
    """Declare that the backward of the op that made x_ND sums rows itself, where the sums are needed."""
    x_ND.takes_unsummed = True  # pyright: ignore[reportAttributeAccessIssue]


def takes_gradient_unsummed(x_ND: Tensor) -> bool:
    return getattr(x_ND, "takes_unsummed", False)


def gather_and_sum_later(source_ND: Tensor, rows: RowLinks, move: RowMove) -> Tensor:
    """The gather, whose backward leaves the sum to the op that made the source where that op asks for it."""
    if takes_gradient_unsummed(source_ND):
        sum_later = partial(SummedRows, sum=move.backward)
        move = move._replace(backward=sum_later)
    return move_rows(source_ND, rows, move)


def plain_gather(source_ND: Tensor, rows: RowLinks) -> Tensor:
    if rows.holes:
        return gather_rows.reference(source_ND, *rows)
    return source_ND.index_select(0, rows.index_R)  # copies whole rows


def plain_sum(y_RD: Tensor, rows: RowLinks) -> Tensor:
    if rows.holes or not sums_in_bags(y_RD):
        return sum_rows.reference(y_RD, *rows)
    return F.embedding_bag(rows.slots_NK, y_RD, mode="sum")  # reads each row once, writes each sum once


def sums_in_bags(y_RD: Tensor) -> bool:
    """Whether torch's sums of chosen rows are sums in the rows' own type; elsewhere they would be rounded."""
    return y_RD.device.type == "cpu" and y_RD.dtype in (torch.float32, torch.float64)


def gather_in_one_pass(source_ND: Tensor, rows: RowLinks) -> Tensor:
    from moefold.kernels.routing.rows_triton import gather_by_index

    return gather_by_index(source_ND, rows.index_R)


def sum_in_one_pass(y_RD: Tensor, rows: RowLinks) -> Tensor:
    """Reads each row once; torch's own sum writes K rows per token first."""
    from moefold.kernels.routing.rows_triton import sum_over_slots

    return sum_over_slots(y_RD, rows.slots_NK)


PLAIN_GATHER = RowMove(plain_gather, plain_sum)
PLAIN_SUM = RowMove(plain_sum, plain_gather)
ONE_PASS_GATHER = RowMove(gather_in_one_pass, sum_in_one_pass)
ONE_PASS_SUM = RowMove(sum_in_one_pass, gather_in_one_pass)


class MoveRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index_R, slots_NK, holes, move: RowMove):
        ctx.save_for_backward(index_R, slots_NK)
        ctx.holes = holes
        ctx.move = move
        rows = RowLinks(index_R, slots_NK, holes)
        return move.forward(x, rows)

    @staticmethod
    def backward(ctx, d):
        index_R, slots_NK = ctx.saved_tensors
        holes = ctx.holes
        rows = RowLinks(index_R, slots_NK, holes)
        move = ctx.move
        dx = move.backward(d, rows)
        return dx, None, None, None, None


def shuffled_rows(n: int, k: int, device: str, drop: int = 0) -> RowLinks:
    """A random index, its slots and whether there are holes. With `drop`, every drop-th row is left out and three rows
    of padding come first."""
    count = n * k
    generator = torch.Generator()
    generator.manual_seed(count)
    choices = torch.randperm(count, generator=generator)
    padding = 0
    if drop:
        kept = choices % drop != 0
        choices = choices[kept]
        padding = 3
    sources = choices // max(k, 1)
    before = (padding, 0)
    index = F.pad(sources, before, value=-1)
    rows = torch.arange(len(choices))
    slots = torch.full((count,), -1)
    slots[choices] = rows + padding
    slots_NK = slots.view(n, k)
    index = index.to(device)
    slots_NK = slots_NK.to(device)
    holes = drop > 0
    return RowLinks(index, slots_NK, holes)


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
    order: RowLinks
    rows: tuple[int, int]


def row_cases(device: str) -> Iterator[RowCase]:
    for n, k, d, drop, spare in ROW_CASE_SIZES:
        order = shuffled_rows(n, k, device, drop)
        defined = len(order.index_R)
        behind = (0, spare)
        index_R = order.index_R
        index_R = F.pad(index_R, behind, value=-1)
        name = f"{n} x {k} rows of {d}, drop {drop}"
        if spare:
            name += f", {spare} undefined behind them"
        order = order._replace(index_R=index_R)
        rows = (defined, defined + spare)
        yield RowCase(name, d, order, rows)


@gather_rows.register_cases
def gather_rows_cases(draw: CaseInputs) -> Cases:
    for case in row_cases(draw.device):
        name, width, order, rows = case
        sources = len(order.slots_NK)
        source_ND = draw.normal(sources, width)
        inputs = (source_ND, *order)
        yield KernelCase(name, inputs, rows=rows)


@spread_rows.register_cases
def spread_rows_cases(draw: CaseInputs) -> Cases:
    for case in row_cases(draw.device):
        name, width, order, (defined, rows) = case
        source_ND = draw.normal(len(order.slots_NK), width)
        ends_E = torch.tensor([defined // 2, defined], dtype=torch.int32, device=draw.device)
        inputs = (source_ND, order.index_R, order.slots_NK, ends_E)
        yield KernelCase(name, inputs, rows=(defined, rows))


@sum_rows.register_cases
def sum_rows_cases(draw: CaseInputs) -> Cases:
    for case in row_cases(draw.device):
        name, width, order, rows = case
        count = len(order.index_R)
        y_RD = draw.normal(count, width)
        inputs = (y_RD, *order)
        yield KernelCase(name, inputs, rows=rows)
