"""Experts whose tiles are multiplied while tokens travel: forward of an MoE layer's middle over an arena, in two
exchanges with a product inside each (kernels/experts/tiles_in_exchange.py).

    plan        as of the arena's dispatcher, and the pieces that tokens come in
    forward     first product while tokens arrive  ->  second product while results return  ->  sums over ranks

Results are those of the dispatcher with the experts' kernels between its verbs: each sum has the same order. There is
no backward, and no run uses this yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from moefold.comm.part_sizes import TURNS
from moefold.dispatch.base import Receipt, Routing
from moefold.dispatch.device_arena import DeviceArena, flag_addresses
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals, return_products
from moefold.kernels.routing.arrival_pieces import PieceMaps, PieceSignals, TileExchange, arrange_pieces


class ArrivalPlan(NamedTuple):
    receipt: Receipt
    pieces: PieceMaps


class ExpertWeights(NamedTuple):
    gate_up_E2FD: Tensor
    down_EDF: Tensor


class TiledExperts:
    """`signals` of kernels; None: the references, between which the arena exchanges. `end_exchange` is that of the
    arena, or another one for ranks that are played."""

    def __init__(self, dispatcher: ArenaDispatcher, kernels: BoundKernels, signals: PieceSignals | None = None):
        self.dispatcher = dispatcher
        self.arena = dispatcher.arena
        self.signals = signals
        self.end_exchange: Callable[[str], None] = self.arena.exchange
        self.multiply_arrivals = kernels[multiply_arrivals]
        self.return_products = kernels[return_products]

    def plan(self, routing: Routing) -> ArrivalPlan:
        """Pieces are arranged behind the plan, before another exchange uses the room of its counts."""
        dispatcher = self.dispatcher
        k = routing.ids_TK.shape[1]
        rooms = dispatcher.plan_rooms(k, routing.weights_TK.dtype)
        receipt = dispatcher.plan(routing)
        leg = receipt.legs[0]
        tail = self.arena.tail
        lost = None if tail is None else tail.lost
        _, _, counts_sBC = rooms.of(dispatcher.index)
        here = (dispatcher.index, dispatcher.etp, dispatcher.rows.arriving)
        return ArrivalPlan(receipt, arrange_pieces(counts_sBC, leg.slots_Ts, *here, lost))

    def forward(self, h_TD: Tensor, weights: ExpertWeights, plan: ArrivalPlan) -> Tensor:
        _, a_RF = self.multiply(h_TD, weights.gate_up_E2FD, plan)
        return self.give_back(a_RF, weights.down_EDF, plan)

    def multiply(self, h_TD: Tensor, gate_up_E2FD: Tensor, plan: ArrivalPlan) -> tuple[Tensor, Tensor]:
        """The pre-activation and the activation of the rows that arrive."""
        order = plan.receipt.order
        slots_Ts = plan.receipt.legs[0].slots_Ts
        self.dispatcher.count_rows("tokens", slots_Ts, h_TD)
        rows = (order.weight_R, order.index_R, order.ends_e)
        rooms = self.dispatcher.every_room(h_TD)
        return self.multiply_arrivals(h_TD, gate_up_E2FD, *rows, slots_Ts, rooms, self.exchange("tokens", plan))

    def give_back(self, a_RF: Tensor, down_EDF: Tensor, plan: ArrivalPlan) -> Tensor:
        """The results of this rank's tokens."""
        order = plan.receipt.order
        exchange = self.exchange("results", plan)
        width = down_EDF.shape[1]
        rooms = self.dispatcher.every_room(a_RF.new_empty(0, width))
        self.dispatcher.count_rows("results", plan.receipt.legs[0].slots_Ts, rooms[0][0])
        return self.return_products(a_RF, down_EDF, order.index_R, order.slots_NK, order.ends_e, rooms, exchange)

    def exchange(self, what: str, plan: ArrivalPlan) -> TileExchange:
        turn = self.arena.number % TURNS
        end = partial(self.end_exchange, what)
        return TileExchange(self.dispatcher.index, turn, plan.pieces, end, self.signals)


def signals_of_arena(arena: DeviceArena, programs: int, senders: int, **further: Any) -> PieceSignals:
    """Signals of an arena whose words have flags behind them. Of `programs`, at most as many as the device has
    processors, since those that wait hold theirs, `senders` send."""
    assert 0 < senders < programs, f"{senders} of {programs} programs send; some have to, and others to multiply"
    flags = flag_addresses(arena.memory, arena.axis.size)
    return PieceSignals(arena.tail, flags, programs, senders, **further)
