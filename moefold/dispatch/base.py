"""The contract of a dispatcher: three verbs between the router and the experts.

    plan(routing) -> Receipt          all metadata; the only place that may wait for the device
    dispatch(h_TD, receipt) -> Rows   tokens travel to where their experts are
    combine(y_RD, receipt) -> h_TD    results come back and are summed per token

T tokens, K choices of a token, R rows (one for each token and chosen expert held here), E experts, e experts held
here, N source rows, D width. Rows are described, not copied: row r is `source_ND[index_R[r]]`, and a kernel may gather
inside its GEMM. No collective may depend on the routing of one rank: a rank with no rows takes part like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class Routing(NamedTuple):
    """What a router decided: for each token its experts and their weights (the gates, differentiable)."""

    weights_TK: torch.Tensor
    ids_TK: torch.Tensor


class Rows(NamedTuple):
    """The experts' input. The rows of one expert are contiguous and end before `offsets_e[e]` (int32, on the device).

    `slots_NK[n]` are the rows made from source n, -1 where it has fewer than K (possible only with `holes`), so that
    the backward of the gather is itself a gather. R may exceed `ends_e[-1]`: rows behind it are undefined, even NaN,
    but for their index, -1 (so `holes` is set); no kernel lets them reach a defined row or a weight's gradient.
    """

    source_ND: torch.Tensor
    order: RowOrder


class RowOrder(NamedTuple):
    """Which row is which: the part of `Rows` that routing alone decides. With `holes`, a slot may be -1 (a choice that
    has no row here) and so may an index (a row of padding: zeros)."""

    index_R: torch.Tensor
    slots_NK: torch.Tensor
    weight_R: torch.Tensor
    ends_e: torch.Tensor
    holes: bool


class Receipt(NamedTuple):
    """How this routing travels: kept between dispatch and combine, and for their backward. `legs` are a dispatcher's
    own."""

    order: RowOrder
    legs: tuple[Any, ...] = ()


class Dispatcher(Protocol):
    def plan(self, routing: Routing) -> Receipt: ...

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows: ...

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor: ...


@dataclass(frozen=True)
class RowPolicy:
    """How rows are made for the experts `first`..`first + held`.

    `drops`: a choice may be -1, none. `multiple`: each expert's rows are padded to a multiple of it. `each`: every
    expert gets exactly so many rows for so many tokens of a rank, padded: shapes are then known without waiting.
    """

    first: int
    held: int
    drops: bool = False
    multiple: int = 1
    each: Callable[[int], int] | None = None

    @property
    def one_row_per_choice(self) -> bool:
        """Every choice becomes a row, and no others are made."""
        return not self.drops and self.multiple == 1 and self.each is None

    def order_by_expert(
        self, ids_NK: torch.Tensor, weights_NK: torch.Tensor, tokens: int, may_be_remote: bool = False
    ) -> RowOrder:
        """The rows of N sources, sorted by expert, stably and without atomics. `tokens`: how many this rank began with.
        `may_be_remote`: some choices may be experts held elsewhere. Where the number of rows is not known from shapes,
        this waits for the device."""
        holes = may_be_remote or not self.one_row_per_choice
        here = (ids_NK - self.first).flatten()
        if holes:
            here = torch.where((here >= 0) & (here < self.held), here, self.held)
        order = here.argsort(stable=True)
        ends_e = torch.searchsorted(here[order], torch.arange(self.held, device=here.device), right=True)
        if holes:
            order, ends_e = self.pad(order, here[order], ends_e, tokens)
        row = torch.arange(len(order), device=order.device)
        slots = torch.full((len(here) + 1,), -1, device=here.device)  # the last takes what padding writes
        slots = slots.scatter_(0, torch.where(order >= 0, order, len(here)), row)[:-1]
        index_R = order.div(ids_NK.shape[1], rounding_mode="floor")  # -1 stays -1
        weights = weights_NK.flatten()
        weight_R = torch.cat((weights, weights.new_zeros(1)))[order] if holes else weights[order]
        return RowOrder(index_R, slots.view(ids_NK.shape), weight_R, ends_e.int(), holes)

    def pad(
        self, order: torch.Tensor, here: torch.Tensor, ends_e: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of experts held here, each expert's as many as asked for, with -1 for padding."""
        counts_e = ends_e.diff(prepend=ends_e.new_zeros(1))
        if self.each is not None:
            size = self.each(tokens)
            sizes_e, total = torch.full_like(counts_e, size), size * self.held
        else:
            sizes_e = -(-counts_e // self.multiple) * self.multiple
            total = int(sizes_e.sum())
        new_ends_e = sizes_e.cumsum(0)
        shift_e = (new_ends_e - sizes_e) - (ends_e - counts_e)
        place = torch.arange(len(order), device=order.device) + shift_e[here.clamp(max=self.held - 1)]
        place = torch.where(here < self.held, place, total)
        padded = torch.full((total + 1,), -1, device=order.device).scatter_(0, place, order)
        return padded[:total], new_ends_e
