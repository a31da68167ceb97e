"""Rows that are gathered, and sums that are made, when they are read: ops see the rows or the sums, sums of gradients
too, and only an op that asks for them gets them from a backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefold.kernels.routing.expert_rows import (
    PLAIN_GATHER,
    PLAIN_SUM,
    gather_rows,
    shuffled_rows,
    sum_rows,
    take_gradient_ungathered,
    take_gradient_unsummed,
)
from moefold.kernels.routing.gathered_rows import GatheredRows, RowLinks, SummedRows, source_of_rows


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def links_with_holes() -> RowLinks:
    return shuffled_rows(12, 3, "cpu", drop=4)


def test_an_op_reads_the_gathered_rows():
    links = links_with_holes()
    source = numbers(12)
    late = GatheredRows(source, links, PLAIN_GATHER.forward)
    plain = gather_rows.reference(source, *links)
    assert late.shape == plain.shape
    assert late.dtype == plain.dtype
    for op in (lambda x: x + 1, lambda x: 2 * x.clone(), lambda x: x[3:7], lambda x: torch.cat((x, x)).sum()):
        assert torch.equal(op(late), op(plain))
    assert type(late + late) is Tensor


class Scaled(torch.autograd.Function):
    """Twice its input; keeps the gradient that it was given."""

    seen: Tensor

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        Scaled.seen = dy
        return 2 * dy


@pytest.mark.parametrize("asks", [False, True])
def test_the_gradient_of_a_sum_is_a_source_and_its_index_for_an_op_that_asks(asks: bool):
    links = links_with_holes()
    x = numbers(len(links.index_R)).requires_grad_()
    y = Scaled.apply(x)
    if asks:
        take_gradient_ungathered(y)
    out = sum_rows.implementations["gather_backward"](y, *links)
    dout = numbers(12)
    out.backward(dout)
    assert isinstance(Scaled.seen, GatheredRows) == asks
    gathered = gather_rows.reference(dout, *links)
    assert torch.equal(x.grad, 2 * gathered)
    source, index = source_of_rows(Scaled.seen)
    assert torch.equal(source, dout if asks else gathered)
    assert index is (links.index_R if asks else None) or torch.equal(index, links.index_R)


def test_a_second_reader_of_the_rows_adds_to_their_gradient():
    links = links_with_holes()
    x = numbers(len(links.index_R)).requires_grad_()
    y = Scaled.apply(x)
    take_gradient_ungathered(y)
    out = sum_rows.implementations["gather_backward"](y, *links)
    dout = numbers(12)
    (out * dout).sum().add(y.sum()).backward()
    assert torch.equal(x.grad, 2 * (gather_rows.reference(dout, *links) + 1))


def test_an_op_reads_the_sums():
    links = links_with_holes()
    y = numbers(len(links.index_R))
    late = SummedRows(y, links, PLAIN_SUM.forward)
    plain = sum_rows.reference(y, *links)
    assert (late.shape, late.dtype) == (plain.shape, plain.dtype)
    for op in (lambda x: x + 1, lambda x: 2 * x.clone(), lambda x: x[3:7], lambda x: torch.empty_like(x).copy_(x)):
        assert torch.equal(op(late), op(plain))
    assert type(late + late) is Tensor


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("asks", [False, True])
def test_the_gradient_of_a_gather_is_rows_and_their_slots_for_an_op_that_asks(asks: bool, readers: int):
    """Where two have gathered the rows, their gradients are added, and so are sums."""
    links = links_with_holes()
    x = numbers(12).requires_grad_()
    source = Scaled.apply(x)
    if asks:
        take_gradient_unsummed(source)
    dy = numbers(len(links.index_R))
    gather = gather_rows.implementations["gather_backward"]
    gathered = [gather(source, *links) * dy for _ in range(readers)]
    torch.cat(gathered).sum().backward()
    assert isinstance(Scaled.seen, SummedRows) == (asks and readers == 1)
    summed = sum_rows.reference(dy, *links)
    torch.testing.assert_close(x.grad, 2 * readers * summed)
    if isinstance(Scaled.seen, SummedRows):
        assert Scaled.seen.links.slots_NK.data_ptr() == links.slots_NK.data_ptr()
