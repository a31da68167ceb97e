"""Experts whose tiles are multiplied while tokens travel: the symmetric dispatcher, with a product inside each of its
two exchanges (kernels/experts/tiles_in_exchange.py).

    plan        as of the arena's dispatcher, and the pieces that tokens come in
    dispatch    tokens stay where they are
    experts     first product while tokens arrive  ->  second product while results return  ->  sums over ranks
    combine     hands on what the experts have given

Results are those of the dispatcher with the experts' kernels between its verbs: each sum has the same order.
Backward is theirs: the graph is that of the dispatcher's verbs around experts whose results are known
(kernels/experts/known_products.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.arena import Arena
from moefold.comm.part_sizes import TURNS
from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy, Rows
from moefold.dispatch.device_arena import DeviceArena, flag_addresses
from moefold.dispatch.room_sizes import ArenaRows
from moefold.dispatch.symmetric import ArenaDispatcher, ArenaLeg, BoundedRoom, CombineRows, PushTokens
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_mlp import ExpertParts
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.experts.known_products import with_known_products
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals, return_products
from moefold.kernels.linear.linear import GroupedGemms
from moefold.kernels.routing.arrival_pieces import PieceMaps, PieceSignals, TileExchange, arrange_pieces
from moefold.kernels.routing.expert_rows import take_gradient_unsummed
from moefold.layout.rerun import RERUN


class TiledWay(NamedTuple):
    """The way of a receipt's rows. `pieces` that tokens come in."""

    order: RowOrder
    leg: ArenaLeg
    pieces: PieceMaps


class ExpertWeights(NamedTuple):
    gate_up_E2FD: Tensor
    down_EDF: Tensor


class ArrivedProducts(NamedTuple):
    """The tokens that have arrived, and what the first product gave: pre-activation and activation of their rows."""

    source_ND: Tensor
    h_R2F: Tensor
    a_RF: Tensor


class TiledExperts(ArenaDispatcher):
    """`signals` of kernels; None: the references, between which the arena exchanges. `end_exchange` is that of the
    arena, or another one for ranks that are played."""

    def __init__(
        self,
        arena: Arena,
        row_policy: RowPolicy,
        kernels: BoundKernels,
        etp: int,
        rows: ArenaRows,
        room: BoundedRoom | None = None,
        signals: PieceSignals | None = None,
    ):
        super().__init__(arena, row_policy, kernels, etp, rows, room)
        self.signals = signals
        self.end_exchange: Callable[[str], None] = arena.exchange
        self.multiply_arrivals = kernels[multiply_arrivals]
        self.return_products = kernels[return_products]
        self.gemms = GroupedGemms(kernels[grouped_gemm], kernels[grouped_gemm_weight])

    def plan(self, routing: Routing) -> Receipt:
        """Pieces are arranged behind the plan, before another exchange uses the room of its counts."""
        k = routing.ids_TK.shape[1]
        rooms = self.plan_rooms(k, routing.weights_TK.dtype)
        receipt = super().plan(routing)
        leg = receipt.legs[0]
        tail = self.arena.tail
        lost = None if tail is None else tail.lost
        _, _, counts_sBC = rooms.of(self.index)
        here = (self.index, self.etp, self.rows.arriving)
        pieces = arrange_pieces(counts_sBC, leg.slots_Ts, *here, lost)
        return receipt._replace(legs=(leg, pieces))

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        around = partial(self.run_experts, *receipt.legs)
        return Rows(h_TD, receipt.order, around=around)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """The experts have combined their rows."""
        return y_RD

    def run_experts(
        self,
        leg: ArenaLeg,
        pieces: PieceMaps,
        experts: Callable[..., Tensor],
        h_TD: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        weight_R: Tensor,
        index_R: Tensor,
        slots_NK: Tensor,
        ends_E: Tensor,
        holes: bool,
        parts: ExpertParts,
    ) -> Tensor:
        """The results of this rank's tokens. `experts` are called for their backward alone."""
        order = RowOrder(index_R, slots_NK, weight_R, ends_E, holes)
        way = TiledWay(order, leg, pieces)
        weights = ExpertWeights(gate_up_E2FD, down_EDF)
        arrived, results_TD = self.forward(h_TD, weights, way)
        source_ND = PushTokens.apply(h_TD, self, order, leg, partial(known_result, arrived.source_ND))
        take_gradient_unsummed(source_ND)
        known = with_known_products(parts, arrived.h_R2F, self.gemms)
        y_RD = experts(source_ND, *weights, weight_R, index_R, slots_NK, ends_E, holes, known)
        return CombineRows.apply(y_RD, self, order, leg, partial(known_result, results_TD))

    @torch.no_grad()
    def forward(self, h_TD: Tensor, weights: ExpertWeights, way: TiledWay) -> tuple[ArrivedProducts, Tensor]:
        """What has arrived, and the results of this rank's tokens: any values in a rerun where nobody reads them."""
        arrived = self.multiply(h_TD, weights.gate_up_E2FD, way)
        if not RERUN.uses_expert_outputs:
            return arrived, torch.empty_like(h_TD)
        return arrived, self.return_results(arrived.a_RF, weights.down_EDF, way)

    def multiply(self, h_TD: Tensor, gate_up_E2FD: Tensor, way: TiledWay) -> ArrivedProducts:
        """The first product of the rows that arrive. The exchange after the next overwrites their tokens, which are
        copied."""
        order, leg, _ = way
        self.count_rows("tokens", leg.slots_Ts, h_TD)
        exchange = self.exchange("tokens", way)
        rows = (order.weight_R, order.index_R, order.ends_e)
        rooms = self.every_room(h_TD)
        h_R2F, a_RF = self.multiply_arrivals(h_TD, gate_up_E2FD, *rows, leg.slots_Ts, rooms, exchange)
        source_ND = self.arrived(h_TD, exchange.turn).clone()
        return ArrivedProducts(source_ND, h_R2F, a_RF)

    def return_results(self, a_RF: Tensor, down_EDF: Tensor, way: TiledWay) -> Tensor:
        """The results of this rank's tokens."""
        order, leg, _ = way
        width = down_EDF.shape[1]
        rooms = self.every_room(a_RF.new_empty(0, width))
        self.count_rows("results", leg.slots_Ts, rooms[0][0])
        exchange = self.exchange("results", way)
        return self.return_products(a_RF, down_EDF, order.index_R, order.slots_NK, order.ends_e, rooms, exchange)

    def exchange(self, what: str, way: TiledWay) -> TileExchange:
        turn = self.arena.number % TURNS
        end = partial(self.end_exchange, what)
        return TileExchange(self.index, turn, way.pieces, end, self.signals)


def known_result(result: Tensor, *_: Any) -> Tensor:
    """The forward of a function whose result is there."""
    return result


def way_of(receipt: Receipt) -> TiledWay:
    return TiledWay(receipt.order, *receipt.legs)


def signals_of_arena(arena: DeviceArena, programs: int, senders: int, **further: Any) -> PieceSignals:
    """Signals of an arena whose words have flags behind them. Of `programs`, at most as many as the device has
    processors, since those that wait hold theirs, `senders` send."""
    assert 0 < senders < programs, f"{senders} of {programs} programs send; some have to, and others to multiply"
    flags = flag_addresses(arena.memory, arena.axis.size)
    return PieceSignals(arena.tail, flags, programs, senders, **further)
