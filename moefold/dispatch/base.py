"""Contracts of dispatch: the three methods of a dispatcher between router and experts, and the contract of a hop.

    plan(routing) -> Receipt          all metadata and the router weights; the only one that may wait for the device
    dispatch(h_TD, receipt) -> Rows   tokens are sent to the ranks of their experts
    combine(y_RD, receipt) -> h_TD    results are sent back and summed per token

Each verb is a step of the layer. `dispatch` and `combine` need nothing but the receipt.

T tokens, K choices of a token, R rows (one for each token and chosen expert held here, and padding), E experts,
e experts held here, N source rows, D width. Rows are described, not copied: row r is `source_ND[index_R[r]]`, and a
kernel may gather inside its GEMM. No collective may depend on the routing of one rank: a rank without rows calls the
same collectives as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from moefold.dispatch.clone_weights import CloneMap, CloneWeights
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.dispatch.traffic import Traffic


class Routing(NamedTuple):
    """Output of the router: for each token its experts (-1: none) and their router weights (differentiable)."""

    weights_TK: Tensor
    ids_TK: Tensor


class RowOrder(NamedTuple):
    """Order of rows: the part of `Rows` that depends on routing only.

    Rows of one expert are contiguous and end before `ends_e[e]` (int32, on the device). `slots_NK[n]` are the rows of
    source n, so that the backward of the gather is itself a gather. With `holes`, a slot may be -1 (a choice without a
    row here), and an index may be -1 (a row of padding).

    R may exceed `ends_e[-1]`. Rows after the last end belong to no expert, and their values are undefined: a kernel
    need not write them, no slot points to them, their index is -1 and their weight is zero.
    """

    index_R: Tensor
    slots_NK: Tensor
    weight_R: Tensor
    ends_e: Tensor
    holes: bool


class Rows(NamedTuple):
    """Input of the experts: arrived tokens, and the order of their rows. `number_N`: numbers of the tokens in the run,
    for recipes that ask for them. `clones`: weights of the experts in spare slots, whose rows come last. `around`: what
    calls the experts' kernel where tokens travel while experts multiply (dispatch/tiled_experts.py): then `source_ND`
    are those of this rank, and results of tokens come back in place of rows; None: tokens have arrived."""

    source_ND: Tensor
    order: RowOrder
    number_N: Tensor | None = None
    clones: CloneWeights | None = None
    around: Callable[..., Tensor] | None = None


class Receipt(NamedTuple):
    """The plan of one routing, held from `plan` to `combine` and for backward. `legs` are private to the dispatcher.
    `rows_moved`: rows sent by this rank in one dispatch and one combine together, a number on the host. `token_bytes`:
    bytes of a token in dispatch, where tokens are sent in another format than results; 0: in the same. `clones`: the
    experts that ranks clone for this microbatch, where they do."""

    order: RowOrder
    legs: tuple[Any, ...] = ()
    rows_moved: int = 0
    token_bytes: int = 0
    clones: CloneMap | None = None

    def bytes_moved(self, row_bytes: int) -> int:
        """Bytes of the rows, exact as a sum over all ranks: dispatch and combine have half of the rows each."""
        both_ways = row_bytes + (self.token_bytes or row_bytes)
        return self.rows_moved * both_ways // 2


class Dispatcher(Protocol):
    def plan(self, routing: Routing) -> Receipt: ...

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows: ...

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor: ...


@runtime_checkable
class PlansParts(Protocol):
    """A dispatcher that exchanges the metadata of several routings at once."""

    def plan_parts(self, routings: Sequence[Routing]) -> list[Receipt]: ...


def plan_parts(dispatcher: Dispatcher, routings: Sequence[Routing]) -> list[Receipt]:
    if isinstance(dispatcher, PlansParts):
        return dispatcher.plan_parts(routings)
    return list(map(dispatcher.plan, routings))


def split_routing(routing: Routing, parts: int) -> list[Routing]:
    """The routings of parts of the tokens, of which some may have none."""
    weights = torch.tensor_split(routing.weights_TK, parts)
    ids = torch.tensor_split(routing.ids_TK, parts)
    return list(map(Routing, weights, ids))


class HopPlan(NamedTuple):
    """One hop's part of a receipt, and the routing of the tokens that will arrive. `choices`: a bound of the choices
    among them."""

    leg: Any
    routing: Routing
    rows_moved: int = 0
    choices: int | None = None


class Hop(Protocol):
    """One exchange of tokens between ranks. Arrivals are again tokens with a routing, so hops can be chained. `out` and
    `back` are differentiable, and need only the leg."""

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan: ...

    def out(self, h_TD: Tensor, leg: Any) -> Tensor: ...

    def back(self, y_ND: Tensor, leg: Any) -> Tensor:
        """Results of arrivals, returned to the ranks of their tokens and summed per token."""
        ...


def most_padded_rows(choices: int, held: int, multiple: int) -> int:
    """Upper bound of the rows of `choices` choices, if each of `held` experts is padded to a multiple."""
    return choices + held * (multiple - 1)


class RowLimits(NamedTuple):
    """What bounds the rows of a routing: tokens of this rank before dispatch, and the most choices of experts held
    here, if the host knows it."""

    tokens: int
    most_choices: int | None


ArrangeRows = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]  # kernels[arrange_rows]


@dataclass(frozen=True)
class RowPolicy:
    """Builder of rows for the experts on `rank` of the expert-parallel axis.

    `drops`: a choice may be -1, none. `multiple`: each expert's rows are padded to a multiple of it. `each`: function
    from the tokens of a rank to the rows of every expert, which are padded to it.
    """

    experts: ExpertPlacement
    rank: int = 0
    drops: bool = False
    multiple: int = 1
    each: Callable[[int], int] | None = None

    @property
    def held(self) -> int:
        return self.experts.held

    @property
    def one_row_per_choice(self) -> bool:
        """Whether every choice is one row, and there is no padding."""
        return not self.drops and not self.is_padded

    def order_by_expert(
        self,
        routing: Routing,
        tokens: int,
        may_be_remote: bool = False,
        most_choices: int | None = None,
    ) -> RowOrder:
        """The rows of N sources, sorted by expert, stably and without atomics. `tokens`: the tokens of this rank before
        dispatch. `may_be_remote`: some choices may be experts of other ranks. `most_choices`: a bound, known to the
        host, of the choices of experts held here. Without that and without `each`, this waits for the device; with a
        bound, R may exceed the last end."""
        weights_NK, ids_NK = routing
        holes = may_be_remote or not self.one_row_per_choice
        # Choices sorted by slot; those of other ranks' experts sort behind the last end.
        slot_NK = self.experts.slot_on_rank(ids_NK, self.rank)
        slot = slot_NK.flatten()
        order = slot.argsort(stable=True)
        sorted_slot = slot[order]
        every_slot = torch.arange(self.held, device=slot.device)
        ends_e = torch.searchsorted(sorted_slot, every_slot, right=True)
        if holes:  # cut off what has no row here, and insert padding
            limits = RowLimits(tokens, most_choices)
            order, ends_e = self.pad(order, sorted_slot, ends_e, limits)
        choices = ids_NK.shape[1]
        index_R = order.div(choices, rounding_mode="floor")  # -1 stays -1
        slots = invert_order(order, slot)
        slots_NK = slots.view(ids_NK.shape)
        weight_R = gather_weights(weights_NK, order, holes)
        ends_e = ends_e.int()
        return RowOrder(index_R, slots_NK, weight_R, ends_e, holes)

    @property
    def is_padded(self) -> bool:
        return self.multiple > 1 or self.each is not None

    def arrange(self, routing: Routing, arrange_rows: ArrangeRows, most_choices: int) -> RowOrder:
        """The same order without padding, by a counting sort. Choices of other ranks' experts come last, as those of
        one more expert, and have no rows."""
        weights_NK, ids_NK = routing
        slot_NK = self.experts.slot_on_rank(ids_NK, self.rank)
        index, slots_NK, weights, ends = arrange_rows(slot_NK, weights_NK, self.held + 1)
        ends_e = ends[: self.held]
        last_end = ends_e[-1]
        row_R = torch.arange(most_choices, device=ends.device)
        is_row_R = row_R < last_end
        index_R = torch.where(is_row_R, index[:most_choices], -1)
        weight_R = torch.where(is_row_R, weights[:most_choices], 0)
        slots_NK = torch.where(slots_NK < last_end, slots_NK, -1)
        return RowOrder(index_R, slots_NK, weight_R, ends_e, holes=True)

    def pad(self, order: Tensor, slot: Tensor, ends_e: Tensor, limits: RowLimits) -> tuple[Tensor, Tensor]:
        """Sorted choices of the experts held here, with -1 for padding, and the new ends."""
        zero = ends_e.new_zeros(1)
        counts_e = ends_e.diff(prepend=zero)
        sizes_e, total = self.padded_sizes(counts_e, limits)
        padded_ends_e = sizes_e.cumsum(0)
        # A row moves by the difference between its expert's new and old begin.
        begins_e = ends_e - counts_e
        padded_begins_e = padded_ends_e - sizes_e
        shift_e = padded_begins_e - begins_e
        row = torch.arange(len(order), device=order.device)
        held_slot = slot.clamp(max=self.held - 1)
        row = row + shift_e[held_slot]
        is_held = slot < self.held
        row = torch.where(is_held, row, total)  # the extra row takes choices without a row here
        size = total + 1
        padded = order.new_full((size,), -1)
        padded.scatter_(0, row, order)
        return padded[:total], padded_ends_e

    def padded_sizes(self, counts_e: Tensor, limits: RowLimits) -> tuple[Tensor, int]:
        """Rows of each expert with padding, and R."""
        if self.each is not None:
            size = self.each(limits.tokens)
            sizes_e = torch.full_like(counts_e, size)
            return sizes_e, size * self.held
        multiples_e = -(-counts_e // self.multiple)
        sizes_e = multiples_e * self.multiple
        if limits.most_choices is None:
            return sizes_e, int(sizes_e.sum())
        rows = most_padded_rows(limits.most_choices, self.held, self.multiple)
        return sizes_e, rows


def rows_between(order: RowOrder, begin: int, end: int) -> RowOrder:
    """The order of the rows from `begin` to `end`, as if there were no others. Slots of the others are holes."""
    slots_NK = order.slots_NK
    is_inside = (slots_NK >= begin) & (slots_NK < end)
    slots_here_NK = slots_NK - begin
    size = end - begin
    ends_e = order.ends_e - begin
    return RowOrder(
        index_R=order.index_R[begin:end],
        slots_NK=torch.where(is_inside, slots_here_NK, -1),
        weight_R=order.weight_R[begin:end],
        ends_e=ends_e.clamp(0, size),
        holes=True,
    )


def invert_order(order: Tensor, like: Tensor) -> Tensor:
    """For each choice its row, -1 for none."""
    row = torch.arange(len(order), device=order.device)
    size = len(like)
    slots = torch.full((size + 1,), -1, device=like.device)  # the last one takes the rows of padding
    choice = torch.where(order >= 0, order, size)
    slots.scatter_(0, choice, row)
    return slots[:-1]


def gather_weights(weights_NK: Tensor, order: Tensor, holes: bool) -> Tensor:
    """The router weight of each row; zero for padding."""
    weights = weights_NK.flatten()
    if holes:
        zero = weights.new_zeros(1)  # what an index of -1 finds
        weights = torch.cat((weights, zero))
    return weights[order]
