"""The symmetric dispatcher: ranks write tokens into each other's memory (comm/arena.py); the host waits for nothing.

    plan       choices of all ranks to all -> places of this rank's rows on every other, order of those that arrive
    dispatch   one copy of a token into a room of each distinct rank of its experts, where these read it
    combine    each rank leaves its results in its own room, and the ranks of the tokens read and sum them

In forward these are five kernels: a kernel that writes to rooms gives the signals of its exchange (ExchangeTail). So it
is in backward, where gradients of tokens are summed by arrived token where the ranks of the tokens read them, too.

    announce_choices, arrange_arrivals | push_peer_rows | sum_rows_into, sum_peer_rows
    push_peer_rows, spread_rows | sum_rows_into, sum_peer_rows | write_choices_into, sum_peer_rows

Rooms have a fixed number of rows, so that all shapes are known at assembly: rows behind the last arrived token are
undefined and have no choice. Sums are those of `dedup`, in the same order. With experts sharded over etp, a token goes
to all etp ranks of its experts, and their partial results are summed with the others.

T tokens, K choices of a token, N rows of a room, D width, s ranks of ep and etp, E experts, R rows of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.announced_choices import blocks_of_tokens, columns_of_counts
from moefold.comm.arena import Arena
from moefold.comm.byte_counters import bytes_are_counted, count_bytes
from moefold.comm.part_sizes import TURNS, aligned_bytes
from moefold.config.errors import UserError
from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy, Rows, most_padded_rows, plan_parts
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.kept_rooms import KeptRoom, KeptRooms
from moefold.dispatch.room_sizes import ArenaRows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.arrivals import ArrangedArrivals, ArrivalShape
from moefold.kernels.routing.expert_rows import spread_rows, take_gradient_unsummed
from moefold.kernels.routing.gathered_rows import SummedRows
from moefold.kernels.routing.peer_plan import (
    PlanRooms,
    announce_choices,
    arrange_arrivals,
)
from moefold.kernels.routing.peer_rows import push_peer_rows, sum_peer_rows, sum_rows_into, write_choices_into
from moefold.layout.peer_rooms import PeerRooms

COUNT = torch.int32


class BoundedRoom:
    """Whether tokens or rows found no room since the step began, on the device, where plans note it."""

    def __init__(self, device: torch.device):
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)


class ArenaLeg(NamedTuple):
    """`slots_Ts`: the row of each token in the room of each rank, -1 for none. `room_s`: the room that each rank keeps
    for the tokens, -1 for none; `kept`: that of this rank."""

    slots_Ts: Tensor
    room_s: Tensor
    kept: KeptRoom


class ArenaDispatcher:
    """Ranks of ep and etp together, of which `etp` hold the same experts, one behind the other."""

    def __init__(
        self,
        arena: Arena,
        row_policy: RowPolicy,
        kernels: BoundKernels,
        etp: int,
        rows: ArenaRows,
        room: BoundedRoom | None = None,
    ):
        self.arena = arena
        self.row_policy = row_policy
        self.etp = etp
        self.rows = rows
        self.index = arena.axis.index
        self.kept_rooms = KeptRooms(arena.arena_rooms, self.index)
        device = arena.arena_rooms.parts[0].device
        self.overflowed = BoundedRoom(device).overflowed if room is None else room.overflowed
        self.known_plan_rooms: dict[tuple[int, int, torch.dtype], PlanRooms] = {}
        self.announce_choices = kernels[announce_choices]
        self.arrange_arrivals = kernels[arrange_arrivals]
        self.push_peer_rows = kernels[push_peer_rows]
        self.sum_peer_rows = kernels[sum_peer_rows]
        self.sum_rows_into = kernels[sum_rows_into]
        self.write_choices_into = kernels[write_choices_into]
        self.spread_rows = kernels[spread_rows]

    @property
    def experts(self) -> ExpertPlacement:
        return self.row_policy.experts

    def plan(self, routing: Routing) -> Receipt:
        weights_TK, ids_TK = routing
        self.require_room(ids_TK.shape[0])
        kept = self.kept_rooms.keep_one()
        arranged = self.exchange_choices(weights_TK.detach(), ids_TK, kept)
        index_R, slots_NK, _, ends_e, slots_Ts, room_s = arranged
        leg = ArenaLeg(slots_Ts, room_s, kept)
        weight_R = ArriveWeights.apply(weights_TK, self, leg, arranged)
        order = RowOrder(index_R, slots_NK, weight_R, ends_e, holes=True)
        return Receipt(order, (leg,))

    def require_room(self, tokens: int) -> None:
        if tokens > self.rows.tokens:
            raise UserError(
                f"parallel.dispatcher = symmetric has room for {self.rows.tokens} tokens of a rank (train.micro_batch "
                f"x data.seq_len over tp x cp), but a rank sends {tokens}; set parallel.dispatcher to dedup"
            )

    def exchange_choices(self, weights_TK: Tensor, ids_TK: Tensor, kept: KeptRoom) -> ArrangedArrivals:
        rooms = self.plan_rooms(ids_TK.shape[1], weights_TK.dtype)
        position_E = self.experts.lookup_table("positions", ids_TK.device)
        tail = self.arena.tail
        self.announce_choices(ids_TK, weights_TK, position_E, self.index, kept.number, *rooms, tail)
        self.count_choices(rooms)
        self.arena.exchange("choices")
        shape = self.arrival_shape(*ids_TK.shape)
        lost = None if tail is None else tail.lost
        arranged = self.arrange_arrivals(*rooms.of(self.index), shape, self.overflowed, lost)
        return ArrangedArrivals(*arranged)

    def plan_rooms(self, k: int, dtype: torch.dtype) -> PlanRooms:
        """Rooms for the choices of all ranks in the next exchange, made once for each shape."""
        turn = self.arena.number % TURNS
        key = (turn, k, dtype)
        if key not in self.known_plan_rooms:
            self.known_plan_rooms[key] = self.view_plan_rooms(k, dtype)
        return self.known_plan_rooms[key]

    def view_plan_rooms(self, k: int, dtype: torch.dtype) -> PlanRooms:
        """Places, weights and counts of all ranks, one behind the other in a room."""
        senders = self.arena.axis.size
        tokens = self.rows.tokens
        blocks = blocks_of_tokens(tokens)
        columns = columns_of_counts(self.experts.experts, self.experts.rank_count)
        choices = senders * tokens
        first_weight = aligned_bytes(choices * k * COUNT.itemsize)
        first_count = first_weight + aligned_bytes(choices * k * dtype.itemsize)
        positions = self.arena.rooms(choices, k, COUNT)
        weights = self.arena.rooms(choices, k, dtype, first_weight)
        counts = self.arena.rooms(senders * blocks, columns, COUNT, first_count)
        return PlanRooms(
            by_sender(positions, senders),
            by_sender(weights, senders),
            by_sender(counts, senders),
        )

    def arrival_shape(self, tokens: int, k: int) -> ArrivalShape:
        policy = self.row_policy
        held = policy.held
        most = self.rows.arriving * min(k, held)
        if self.rows.choices is not None:
            most = min(most, self.rows.choices)
        each = policy.each(tokens) if policy.each is not None else 0
        rows = each * held if each else most_padded_rows(most, held, policy.multiple)
        return ArrivalShape(self.index, self.etp, held, tokens, self.rows.arriving, rows, policy.multiple, each)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        source_ND = self.send(h_TD, receipt)
        return Rows(source_ND, receipt.order)

    def send(self, x_TD: Tensor, receipt: Receipt) -> Tensor:
        """On one lane the gradient may come as rows of experts, which are summed where other ranks read them. Lanes
        would have to know of the memory inside it."""
        source_ND = PushTokens.apply(x_TD, self, receipt.order, receipt.legs[0], self.push_tokens)
        if self.kept_rooms.are_there:
            take_gradient_unsummed(source_ND)
        return source_ND

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """Results of experts, summed by arrived token where the ranks of the tokens read them."""
        return CombineRows.apply(y_RD, self, receipt.order, receipt.legs[0], self.sum_results_back)

    def give_back(self, y_ND: Tensor, receipt: Receipt) -> Tensor:
        return SumResults.apply(y_ND, self, receipt.legs[0])

    def push_tokens(self, x_TD: Tensor, leg: ArenaLeg) -> Tensor:
        """The rows that arrive. The first rows of a leg lie in the kept room of this rank. Others, and those for which
        it has none, lie in the room of a turn, which the exchange after the next overwrites, and are copied."""
        room_s = None if leg.kept.is_taken else leg.room_s
        kept_ND = leg.kept.take(self.rows.arriving, x_TD)
        turn = self.push(x_TD, leg, "tokens", room_s)
        return self.arrived(x_TD, turn).clone() if kept_ND is None else kept_ND

    def push(self, x_TD: Tensor, leg: ArenaLeg, what: str, room_s: Tensor | None = None) -> int:
        """The turn in whose rooms the rows arrive."""
        turn = self.arena.number % TURNS
        self.count_rows(what, leg.slots_Ts, x_TD)
        self.push_peer_rows(x_TD, leg.slots_Ts, self.every_room(x_TD), turn, room_s, self.arena.tail)
        self.arena.exchange(what)
        return turn

    def every_room(self, x_TD: Tensor) -> PeerRooms:
        """All rooms of each rank, for rows like those of `x_TD`."""
        return self.arena.arena_rooms.together(self.rows.arriving + 1, x_TD.shape[1], x_TD.dtype)

    def arrived(self, x_TD: Tensor, turn: int) -> Tensor:
        """The rows like those of `x_TD` that have arrived in the room of this rank."""
        own = self.every_room(x_TD)[self.index]
        return own[turn, : self.rows.arriving]

    def sum_results_back(self, y_RD: Tensor, order: RowOrder, leg: ArenaLeg) -> Tensor:
        return self.sum_rows_back(y_RD, order, leg, "results")

    def sum_rows_back(self, y_RD: Tensor, order: RowOrder, leg: ArenaLeg, what: str) -> Tensor:
        """x_TD: the sum of each token's rows on all ranks."""
        rooms = self.rooms_for(y_RD)
        self.count_rows(what, leg.slots_Ts, y_RD)
        self.sum_rows_into(y_RD, order.slots_NK, rooms, self.index, self.arena.tail)
        self.arena.exchange(what)
        return self.sum_peer_rows(rooms, leg.slots_Ts)

    def sum_gradients_back(self, dx_ND: Tensor, order: RowOrder, leg: ArenaLeg) -> Tensor:
        """dx_TD: the sum of each token's gradients on all ranks."""
        what = "gradients of tokens"
        if isinstance(dx_ND, SummedRows) and have_same_memory(dx_ND.links.slots_NK, order.slots_NK):
            return self.sum_rows_back(dx_ND.y_RD, order, leg, what)
        return self.sum_back(dx_ND, leg, what)

    def sum_weights_back(self, dweight_R: Tensor, slots_NK: Tensor, leg: ArenaLeg) -> Tensor:
        """dweights_TK: the gradient of each choice's weight, from the rank that has its row."""
        what = "gradients of router weights"
        rooms = self.arena.rooms(self.rows.arriving + 1, slots_NK.shape[1], dweight_R.dtype)
        self.count_rows(what, leg.slots_Ts, rooms[self.index])
        self.write_choices_into(dweight_R, slots_NK, rooms, self.index, self.arena.tail)
        self.arena.exchange(what)
        return self.sum_peer_rows(rooms, leg.slots_Ts)

    def sum_back(self, y_ND: Tensor, leg: ArenaLeg, what: str) -> Tensor:
        """x_TD: the sum of each token's rows on all ranks."""
        rooms = self.rooms_for(y_ND)
        self.count_rows(what, leg.slots_Ts, y_ND)
        own = rooms[self.index]
        own[: len(y_ND)].copy_(y_ND)
        self.arena.exchange(what)
        return self.sum_peer_rows(rooms, leg.slots_Ts)

    def rooms_for(self, x: Tensor) -> PeerRooms:
        width = x.shape[1]
        return self.arena.rooms(self.rows.arriving + 1, width, x.dtype)

    def count_choices(self, rooms: PlanRooms) -> None:
        """Count what this rank writes to the others: its part of each room of a plan."""
        if not bytes_are_counted():
            return
        others = self.arena.axis.size - 1
        written = [of_ranks[self.index][self.index].nbytes for of_ranks in rooms]
        count_bytes("choices", self.arena.axis, others * sum(written))

    def count_rows(self, what: str, slots_Ts: Tensor, x: Tensor) -> None:
        """Count the rows like `x` that this rank writes to the rooms of others, or reads there."""
        if not bytes_are_counted():
            return
        elsewhere_Ts = slots_Ts >= 0
        elsewhere_Ts[:, self.index] = False
        rows = int(elsewhere_Ts.sum())
        row_bytes = x.shape[1] * x.itemsize
        count_bytes(what, self.arena.axis, rows * row_bytes)


def have_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape begin at one address."""
    return x.shape == y.shape and x.data_ptr() == y.data_ptr()


def by_sender(rooms: PeerRooms, senders: int) -> PeerRooms:
    """The same rooms with a first dim of senders."""
    return PeerRooms(room.view(senders, -1, room.shape[1]) for room in rooms)


class EagerFunction(torch.autograd.Function):
    """An autograd function for eager steps alone. torch's own `apply` also looks for functorch's transforms and for
    their wrappers in all arguments, which takes the host half as long again."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


class ArriveWeights(EagerFunction):
    """Router weights of the rows that a plan has arranged; backward returns their gradients."""

    @staticmethod
    def forward(ctx, weights_TK, dispatcher: ArenaDispatcher, leg: ArenaLeg, arranged: ArrangedArrivals):
        ctx.way = (dispatcher, leg, arranged.slots_NK)
        ctx.set_materialize_grads(False)
        return arranged.weight_R

    @staticmethod
    def backward(ctx, *gradients):
        (dweight_R,) = gradients
        if dweight_R is None:
            return None, None, None, None
        dispatcher, leg, slots_NK = ctx.way
        dweights_TK = dispatcher.sum_weights_back(dweight_R, slots_NK, leg)
        return dweights_TK, None, None, None


PushForward = Callable[[Tensor, ArenaLeg], Tensor]
SumForward = Callable[[Tensor, RowOrder, ArenaLeg], Tensor]


class PushTokens(EagerFunction):
    """`push` gives the tokens that arrive."""

    @staticmethod
    def forward(ctx, h_TD, dispatcher: ArenaDispatcher, order: RowOrder, leg: ArenaLeg, push: PushForward):
        ctx.way = (dispatcher, order, leg)
        return push(h_TD, leg)

    @staticmethod
    def backward(ctx, *gradients):
        dispatcher, order, leg = ctx.way
        dh_TD = dispatcher.sum_gradients_back(gradients[0], order, leg)
        return dh_TD, None, None, None, None


class SumResults(EagerFunction):
    @staticmethod
    def forward(ctx, y_ND, dispatcher: ArenaDispatcher, leg: ArenaLeg):
        ctx.way = (dispatcher, leg)
        return dispatcher.sum_back(y_ND, leg, "results")

    @staticmethod
    def backward(ctx, *gradients):
        dispatcher, leg = ctx.way
        (dx_TD,) = gradients
        turn = dispatcher.push(dx_TD, leg, "gradients of results")
        dy_ND = dispatcher.arrived(dx_TD, turn).clone()
        return dy_ND, None, None


class CombineRows(EagerFunction):
    """Experts' rows to tokens, by `sum_back`. In backward, gradients of experts' rows are spread from the room
    itself."""

    @staticmethod
    def forward(ctx, y_RD, dispatcher: ArenaDispatcher, order: RowOrder, leg: ArenaLeg, sum_back: SumForward):
        ctx.way = (dispatcher, order, leg)
        return sum_back(y_RD, order, leg)

    @staticmethod
    def backward(ctx, *gradients):
        dispatcher, order, leg = ctx.way
        (dx_TD,) = gradients
        turn = dispatcher.push(dx_TD, leg, "gradients of results")
        dy_ND = dispatcher.arrived(dx_TD, turn)
        dy_RD = dispatcher.spread_rows(dy_ND, order.index_R, order.slots_NK, order.ends_e)
        return dy_RD, None, None, None, None


class SymmetricDispatcher:
    """`direct` sends through the arena. `collectives`, which has no bound of tokens, takes its place in passes without
    backward, which may have more tokens at a time than training, and in steps that are run again since rows found no
    room (`room`; None: there is room for all)."""

    def __init__(
        self,
        direct: ArenaDispatcher,
        collectives: HopDispatcher,
        arena: Arena,
        room: BoundedRoom | None = None,
    ):
        self.direct = direct
        self.collectives = collectives
        self.sender: ArenaDispatcher | HopDispatcher = direct
        self.arena = arena
        self.room = room

    def begin_step(self) -> None:
        self.overflowed().zero_()

    def overflowed(self) -> Tensor:
        assert self.room is not None, "rooms have a bound"
        return self.room.overflowed

    def end_turns(self) -> None:
        """Let the next step begin in the room of the same turn, as a captured step does whenever it is replayed."""
        if self.arena.number % TURNS:
            self.arena.exchange("nothing")

    def lifted(self) -> AbstractContextManager[None]:
        return by_collectives([self])

    def plan(self, routing: Routing) -> Receipt:
        return self.sender.plan(routing)

    def plan_parts(self, routings: Sequence[Routing]) -> list[Receipt]:
        return plan_parts(self.sender, routings)

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
