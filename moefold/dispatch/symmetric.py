"""The symmetric hop: ranks write tokens into each other's memory (comm/arena.py), and the host waits for nothing.

    plan       counts of all ranks -> where rows of this rank begin on every other -> choices and router weights
    out        one copy of a token into the room of each distinct rank of its experts
    back       each rank leaves its results in its own room, and the ranks of the tokens read and sum them

Rooms have a fixed number of rows, so that all shapes are known at assembly: rows behind the last arrived token are
undefined and have no choice. Sums are those of `dedup`, in the same order. With experts sharded over etp, a token goes
to all etp ranks of its experts, and their partial results are summed with the others.

T tokens, K choices of a token, N rows of a room, D width, n ranks of ep, s ranks of ep and etp, B bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.arena import Arena
from moefold.config.errors import UserError
from moefold.dispatch.base import HopPlan, Receipt, Routing, RowOrder, Rows
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.traffic import Traffic
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.kernels.routing.peer_rows import (
    count_parcels,
    place_parcels,
    push_peer_rows,
    sum_peer_rows,
    sum_rows_into,
)

WORD = torch.int64


class ArenaRows(NamedTuple):
    """Bounds that the host knows: `tokens` that a rank sends at most, `arriving` that a room has rows for, and
    `choices` of a rank's experts that there are rows for; None: as many as come with these tokens."""

    tokens: int
    arriving: int
    choices: int | None = None


def arena_rows(tokens: int, senders: int, most_rows: int) -> ArenaRows:
    """Bounds for `most_rows` of a rank; 0: for all that can come."""
    all_tokens = tokens * senders
    if not most_rows:
        return ArenaRows(tokens, all_tokens)
    arriving = min(all_tokens, most_rows)
    return ArenaRows(tokens, arriving, most_rows)


class BoundedRoom:
    """Whether tokens or rows found no room since the step began, on the device."""

    def __init__(self, device: torch.device):
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)

    def note(self, overflows: Tensor) -> None:
        self.overflowed |= overflows


class SymmetricLeg(NamedTuple):
    """`slots_Ts`: the row of each token in the room of each rank, -1 for none."""

    slots_Ts: Tensor


class SymmetricHop:
    """A hop over the ranks of ep and etp together, of which `etp` hold the same experts, one behind the other."""

    def __init__(
        self,
        arena: Arena,
        experts: ExpertPlacement,
        kernels: BoundKernels,
        etp: int,
        rows: ArenaRows,
        room: BoundedRoom | None = None,
    ):
        self.arena = arena
        self.room = room
        self.experts = experts
        self.etp = etp
        self.index = arena.axis.index
        self.rank = self.index // etp
        self.rows = rows
        self.count_parcels = kernels[count_parcels]
        self.place_parcels = kernels[place_parcels]
        self.push_peer_rows = kernels[push_peer_rows]
        self.sum_peer_rows = kernels[sum_peer_rows]
        self.sum_rows_into = kernels[sum_rows_into]
        self.gather_rows = kernels[gather_rows]

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan:
        weights_TK, ids_TK = routing
        tokens, k = ids_TK.shape
        self.require_room(tokens)
        ranks = self.experts.rank_count
        rank_TK = self.experts.rank_of(ids_TK)
        rank_TK = torch.where(ids_TK >= 0, rank_TK, ranks)
        counts_s2n = self.exchange_counts(rank_TK, ranks)
        tokens_sn = counts_s2n[:, 0]
        slots_Tn = self.place_parcels(rank_TK, tokens_sn, self.index, self.rows.arriving)
        leg = SymmetricLeg(slots_Tn.repeat_interleave(self.etp, dim=1))
        arrived_n, choices_n = counts_s2n.sum(0)
        weights_NK, sent_NK = SendChoices.apply(weights_TK, ids_TK, self, leg)  # pyright: ignore[reportGeneralTypeIssues]
        ids_NK = self.arrived_ids(sent_NK, arrived_n[self.rank])
        most_choices = self.rows.arriving * min(k, self.experts.held)
        if self.room is not None and self.rows.choices is not None:
            most_choices = min(most_choices, self.rows.choices)
            overflows_n = (arrived_n > self.rows.arriving) | (choices_n > most_choices)
            self.room.note(overflows_n.any())
            ids_NK = self.keep_first(ids_NK, most_choices)
        arrivals = Routing(weights_NK, ids_NK)
        return HopPlan(leg, arrivals, choices=most_choices, empty_rows=True)

    def arrived_ids(self, sent_NK: Tensor, arrived: Tensor) -> Tensor:
        """Ids of arrived choices, -1 behind them. What a lost rank has left in a room is no id: looked up, it would end
        the device before the host can name that rank."""
        device = sent_NK.device
        row_N = torch.arange(self.rows.arriving, device=device)
        has_arrived_N = row_N < arrived
        is_id_NK = sent_NK >= 0
        is_id_NK &= sent_NK < self.experts.experts
        is_id_NK &= has_arrived_N[:, None]
        return torch.where(is_id_NK, sent_NK, -1)

    def keep_first(self, ids_NK: Tensor, most: int) -> Tensor:
        """So many choices of experts held here, and none behind them."""
        slot_NK = self.experts.slot_on_rank(ids_NK, self.rank)
        is_held = (slot_NK < self.experts.held).flatten()
        number = is_held.cumsum(0)
        keeps_NK = (number <= most).view(ids_NK.shape)
        return torch.where(keeps_NK, ids_NK, -1)

    def require_room(self, tokens: int) -> None:
        if tokens > self.rows.tokens:
            raise UserError(
                f"parallel.dispatcher = symmetric has room for {self.rows.tokens} tokens of a rank (train.micro_batch "
                f"x data.seq_len over tp x cp), but a rank sends {tokens}; set parallel.dispatcher to dedup"
            )

    def exchange_counts(self, rank_TK: Tensor, ranks: int) -> Tensor:
        """(s, 2, n): tokens and choices of every sender for every rank of ep."""
        senders = self.arena.axis.size
        mine = self.count_parcels(rank_TK, ranks)
        width = mine.numel()
        rooms = self.arena.rooms(senders, width, WORD)
        for room in rooms:
            room[self.index].copy_(mine.flatten())
        self.arena.exchange("counts of tokens")
        counts = rooms[self.index].clone()
        return counts.view(senders, 2, ranks)

    def out(self, h_TD: Tensor, leg: SymmetricLeg) -> Tensor:
        return PushTokens.apply(h_TD, self, leg)  # pyright: ignore[reportReturnType]

    def back(self, y_ND: Tensor, leg: SymmetricLeg) -> Tensor:
        return SumResults.apply(y_ND, self, leg)  # pyright: ignore[reportReturnType]

    def combine_rows(self, y_RD: Tensor, order: RowOrder, leg: SymmetricLeg) -> Tensor:
        """Results of experts, summed by arrived token where the ranks of the tokens read them."""
        return CombineRows.apply(y_RD, self, order, leg)  # pyright: ignore[reportReturnType]

    def push(self, x_TD: Tensor, leg: SymmetricLeg, what: str) -> Tensor:
        """x_ND: the rows that arrive. They are copied out of the room, which the exchange after the next overwrites."""
        return self.push_to_rooms(x_TD, leg, what).clone()

    def push_to_rooms(self, x_TD: Tensor, leg: SymmetricLeg, what: str) -> Tensor:
        """The rows that arrive, in this rank's room."""
        rooms = self.rooms_for(x_TD)
        self.push_peer_rows(x_TD.contiguous(), leg.slots_Ts, rooms)
        self.arena.exchange(what)
        own = rooms[self.index]
        return own[: self.rows.arriving]

    def sum_rows_back(self, y_RD: Tensor, order: RowOrder, leg: SymmetricLeg) -> Tensor:
        """x_TD: the sum of each token's rows on all ranks."""
        rooms = self.rooms_for(y_RD)
        self.sum_rows_into(y_RD, order.slots_NK, rooms[self.index])
        self.arena.exchange("results")
        return self.sum_peer_rows(rooms, leg.slots_Ts)

    def sum_back(self, y_ND: Tensor, leg: SymmetricLeg, what: str) -> Tensor:
        """x_TD: the sum of each token's rows on all ranks."""
        rooms = self.rooms_for(y_ND)
        own = rooms[self.index]
        own[: len(y_ND)].copy_(y_ND)
        self.arena.exchange(what)
        return self.sum_peer_rows(rooms, leg.slots_Ts)

    def rooms_for(self, x: Tensor) -> list[Tensor]:
        width = x.shape[1]
        return self.arena.rooms(self.rows.arriving + 1, width, x.dtype)


def row_bytes_at_most(row_width: int, itemsize: int, k: int) -> int:
    """Bytes of the longest row that is sent: a token of a model, in fp64 a number, or choices with their weights."""
    token = max(row_width, 1) * itemsize
    fp8_token = row_width + WORD.itemsize * (row_width // 128 + 1)
    choices = k * 2 * WORD.itemsize
    return max(token, fp8_token, choices)


def room_bytes(rows: ArenaRows, senders: int, ranks: int, row_bytes: int) -> int:
    tokens = (rows.arriving + 1) * row_bytes
    counts = senders * 2 * ranks * WORD.itemsize
    return max(tokens, counts)


class PushTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, hop: SymmetricHop, leg: SymmetricLeg):
        ctx.way = (hop, leg)
        return hop.push(h_TD, leg, "tokens")

    @staticmethod
    def backward(ctx, *gradients):
        hop, leg = ctx.way
        dh_TD = hop.sum_back(gradients[0], leg, "gradients of tokens")
        return dh_TD, None, None


class SumResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_ND, hop: SymmetricHop, leg: SymmetricLeg):
        ctx.way = (hop, leg)
        return hop.sum_back(y_ND, leg, "results")

    @staticmethod
    def backward(ctx, *gradients):
        hop, leg = ctx.way
        dy_ND = hop.push(gradients[0], leg, "gradients of results")
        return dy_ND, None, None


class CombineRows(torch.autograd.Function):
    """Experts' rows to tokens. In backward, gradients of experts' rows are gathered from the room itself."""

    @staticmethod
    def forward(ctx, y_RD, hop: SymmetricHop, order: RowOrder, leg: SymmetricLeg):
        ctx.way = (hop, order, leg)
        return hop.sum_rows_back(y_RD, order, leg)

    @staticmethod
    def backward(ctx, *gradients):
        hop, order, leg = ctx.way
        dy_ND = hop.push_to_rooms(gradients[0], leg, "gradients of results")
        dy_RD = hop.gather_rows(dy_ND, order.index_R, order.slots_NK, order.holes)
        return dy_RD, None, None, None


class SendChoices(torch.autograd.Function):
    """Router weights and choices, as one row of bytes; backward returns the weights' gradients."""

    @staticmethod
    def forward(ctx, weights_TK, ids_TK, hop: SymmetricHop, leg: SymmetricLeg):
        ctx.way = (hop, leg)
        weight_bytes = weights_TK.contiguous().view(torch.uint8)
        id_bytes = ids_TK.contiguous().view(torch.uint8)
        payload_TB = torch.cat((id_bytes, weight_bytes), dim=1)
        arrived_NB = hop.push(payload_TB, leg, "choices")
        ids_width = id_bytes.shape[1]
        ids_NB = arrived_NB[:, :ids_width].contiguous()
        weights_NB = arrived_NB[:, ids_width:].contiguous()
        ids_NK = ids_NB.view(ids_TK.dtype)
        ctx.mark_non_differentiable(ids_NK)
        return weights_NB.view(weights_TK.dtype), ids_NK

    @staticmethod
    def backward(ctx, *gradients):
        hop, leg = ctx.way
        dweights_TK = hop.sum_back(gradients[0], leg, "gradients of router weights")
        return dweights_TK, None, None, None


class ArenaDispatcher(HopDispatcher):
    """A dispatcher of one hop through an arena, which sums experts' rows on the way back."""

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        (hop,) = self.hops
        assert isinstance(hop, SymmetricHop)
        (leg,) = receipt.legs
        return hop.combine_rows(y_RD, receipt.order, leg)


class SymmetricDispatcher:
    """`direct` sends through the arena. `collectives`, which has no bound of tokens, takes its place in passes without
    backward, which may have more tokens at a time than training, and in steps that are run again since rows found no
    room (`room`; None: there is room for all)."""

    def __init__(
        self, direct: HopDispatcher, collectives: HopDispatcher, arena: Arena, room: BoundedRoom | None = None
    ):
        self.direct = direct
        self.collectives = collectives
        self.sender = direct
        self.arena = arena
        self.room = room

    def begin_step(self) -> None:
        self.overflowed().zero_()

    def overflowed(self) -> Tensor:
        assert self.room is not None, "rooms have a bound"
        return self.room.overflowed

    def lifted(self) -> AbstractContextManager[None]:
        return by_collectives([self])

    def plan(self, routing: Routing) -> Receipt:
        return self.sender.plan(routing)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        return self.sender.dispatch(h_TD, receipt)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        return self.sender.combine(y_RD, receipt)

    def send(self, x_TD: Tensor, receipt: Receipt) -> Tensor:
        return self.sender.send(x_TD, receipt)

    def give_back(self, y_ND: Tensor, receipt: Receipt) -> Tensor:
        return self.sender.give_back(y_ND, receipt)


@contextmanager
def by_collectives(dispatchers: Iterable[SymmetricDispatcher]) -> Iterator[None]:
    """Send by collectives inside the block. Every rank must enter it."""
    before = {dispatcher: dispatcher.sender for dispatcher in dispatchers}
    for dispatcher in before:
        dispatcher.sender = dispatcher.collectives
    try:
        yield
    finally:
        for dispatcher, sender in before.items():
            dispatcher.sender = sender
