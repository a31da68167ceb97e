"""Rows of a source that are gathered when an op reads them, the gradient of a sum over slots; and sums over slots that
are made when an op reads them, the gradient of a gather.

The backward of `sum_rows` gathers each token's gradient to all of its rows. An op that quantises needs no such copy: it
quantises a token once and gathers bytes, or gathers while it reads. An op whose outputs are summed asks for it
(`take_gradient_ungathered` of expert_rows.py); to all others the gradient is a plain tensor. The backward of
`gather_rows` sums the gradients of a source's rows in a tensor of their own. An op that sums them elsewhere, such as in
memory that other ranks read, asks for the rows (`take_gradient_unsummed`).

N source rows, R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map_only


class RowLinks(NamedTuple):
    """Where rows come from and go to, and whether either may hold -1."""

    index_R: Tensor
    slots_NK: Tensor
    holes: bool


RowMovement = Callable[[Tensor, RowLinks], Tensor]


class GatheredRows(Tensor):
    """x_RD = source_ND[index_R]. Any torch op but `contiguous` reads the gathered rows."""

    source_ND: Tensor
    links: RowLinks
    gather: RowMovement

    @staticmethod
    def __new__(cls, source_ND: Tensor, links: RowLinks, gather: RowMovement) -> GatheredRows:
        rows = len(links.index_R)
        width = source_ND.shape[1]
        shape = (rows, width)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=source_ND.dtype, device=source_ND.device)

    def __init__(self, source_ND: Tensor, links: RowLinks, gather: RowMovement):
        self.source_ND = source_ND
        self.links = links
        self.gather = gather

    def gathered(self) -> Tensor:
        return self.gather(self.source_ND, self.links)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        plain_args, plain_kwargs = tree_map_only(GatheredRows, GatheredRows.gathered, inputs)
        return func(*plain_args, **plain_kwargs)


class SummedRows(Tensor):
    """x_ND[n] = the sum of y_RD over the slots of n. Any torch op reads the sums."""

    y_RD: Tensor
    links: RowLinks
    sum_rows: RowMovement

    @staticmethod
    def __new__(cls, y_RD: Tensor, links: RowLinks, sum: RowMovement) -> SummedRows:
        shape = (len(links.slots_NK), y_RD.shape[1])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=y_RD.dtype, device=y_RD.device)

    def __init__(self, y_RD: Tensor, links: RowLinks, sum: RowMovement):
        self.y_RD = y_RD
        self.links = links
        self.sum_rows = sum

    def summed(self) -> Tensor:
        return self.sum_rows(self.y_RD, self.links)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        plain_args, plain_kwargs = tree_map_only(SummedRows, SummedRows.summed, inputs)
        return func(*plain_args, **plain_kwargs)


def source_of_rows(x_RD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows and the index that gathers them, None where they are gathered already."""
    if isinstance(x_RD, GatheredRows):
        return x_RD.source_ND.contiguous(), x_RD.links.index_R
    return x_RD.contiguous(), None
