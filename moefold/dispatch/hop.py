"""The all-to-all hop: copies of tokens ("parcels") are sent to the ranks of one axis; results return and are summed.

A packer determines the parcels:

    per_choice    one for each chosen expert: a plain all-to-all
    per_rank      one for each distinct rank of a token's experts, with the list of its experts there
    for_everyone  one for each rank of the axis: for expert tensor parallelism

T tokens, K choices of a token, P parcels, C parcels of a token at most, N tokens that arrive, n ranks of the axis,
D width. An id of -1 is no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all, all_to_all_no_grad
from moefold.dispatch.base import HopPlan, Routing
from moefold.dispatch.traffic import ExchangeSizes, Traffic
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import gather_rows, sum_rows
from moefold.layout.axes import Axis


class ParcelSlots(NamedTuple):
    """Parcels, sorted by destination. `index_P`: token of each parcel; `slots_TC`: parcels of each token (-1: none,
    with `holes`)."""

    index_P: Tensor
    slots_TC: Tensor
    holes: bool


class Parcels(NamedTuple):
    """Parcels, with their choices and weights."""

    slots: ParcelSlots
    routing: Routing


class Leg(NamedTuple):
    """The send plan of one hop: parcels of each token, and the numbers of parcels sent to and received from each
    rank."""

    slots: ParcelSlots
    send: list[int]
    receive: list[int]


RankOf = Callable[[Tensor], Tensor]
SizesOf = Callable[[Traffic], ExchangeSizes]
Counts = list[int]  # parcels for each rank
Packer = Callable[[Routing, RankOf, Counts], Parcels]


def ranks_of_choices(ids: Tensor, rank_of: RankOf, none: int) -> Tensor:
    """The rank of each choice; `none` for a missing one."""
    ranks = rank_of(ids)
    return torch.where(ids >= 0, ranks, none)


def pack_per_choice(routing: Routing, rank_of: RankOf, send: list[int]) -> Parcels:
    weights_TK, ids_TK = routing
    ids = ids_TK.flatten()
    weights = weights_TK.flatten()
    parcels = sum(send)
    rank = ranks_of_choices(ids, rank_of, none=len(send))  # missing choices sort last
    order = rank.argsort(stable=True)
    order_P = order[:parcels]
    number_P = torch.arange(parcels, device=order.device)
    slots = torch.full_like(ids, -1)
    slots.scatter_(0, order_P, number_P)
    # A parcel is one choice: its token, its expert and its weight.
    token_P = order_P // ids_TK.shape[1]
    ids_P = ids[order_P]
    weights_P = weights[order_P]
    parcel_routing = Routing(weights_P[:, None], ids_P[:, None])
    slots_TK = slots.view(ids_TK.shape)
    holes = parcels < len(ids)
    parcel_slots = ParcelSlots(token_P, slots_TK, holes)
    return Parcels(parcel_slots, parcel_routing)


def pack_per_rank(routing: Routing, rank_of: RankOf, send: list[int]) -> Parcels:
    weights_TK, ids_TK = routing
    tokens = len(ids_TK)
    ranks = len(send)
    parcels = sum(send)
    device = ids_TK.device
    rank_TK = ranks_of_choices(ids_TK, rank_of, none=ranks)
    rank_KT = rank_TK.T
    goes_nT = ids_TK.new_zeros(ranks + 1, tokens, dtype=torch.bool)
    goes_nT.scatter_(0, rank_KT, True)
    goes_nT = goes_nT[:ranks]  # without the row of missing choices
    # Parcels are numbered rank by rank; a last place takes what is not sent.
    goes = goes_nT.flatten()
    number = goes.cumsum(0) - 1
    place = torch.where(goes, number, parcels)
    every = torch.arange(ranks * tokens, device=device)
    sent = torch.empty(parcels + 1, dtype=torch.int64, device=device)
    sent.scatter_(0, place, every)
    sent_P = sent[:parcels]
    rank_P = sent_P.div(max(tokens, 1), rounding_mode="floor")
    token_P = sent_P - rank_P * tokens
    slots = torch.where(goes, number, -1)
    slots_nT = slots.view(ranks, tokens)
    # A parcel lists the choices that its rank holds, -1 in place of the others.
    rank_PK = rank_TK[token_P]
    held_there_PK = rank_PK == rank_P[:, None]
    ids_PK = torch.where(held_there_PK, ids_TK[token_P], -1)
    weights_PK = weights_TK[token_P]
    parcel_routing = Routing(weights_PK, ids_PK)
    slots_Tn = slots_nT.T.contiguous()
    parcel_slots = ParcelSlots(token_P, slots_Tn, holes=True)
    return Parcels(parcel_slots, parcel_routing)


def pack_for_everyone(routing: Routing, rank_of: RankOf, send: list[int]) -> Parcels:
    weights_TK, ids_TK = routing
    ranks = len(send)
    tokens = len(ids_TK)
    device = ids_TK.device
    token_T = torch.arange(tokens, device=device)
    token_P = token_T.repeat(ranks)
    slots = torch.arange(ranks * tokens, device=device)
    slots_nT = slots.view(ranks, tokens)
    weights_PK = weights_TK.repeat(ranks, 1)
    ids_PK = ids_TK.repeat(ranks, 1)
    parcel_routing = Routing(weights_PK, ids_PK)
    parcel_slots = ParcelSlots(token_P, slots_nT.T, holes=False)
    return Parcels(parcel_slots, parcel_routing)


@dataclass(frozen=True, eq=False)
class AllToAllHop:
    """A hop over one axis by all-to-all collectives. `rank_of` maps expert ids to ranks of the axis, `sizes_of` the
    traffic of the layer to the sizes of this exchange."""

    axis: Axis
    pack: Packer
    rank_of: RankOf
    sizes_of: SizesOf
    kernels: BoundKernels

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan:
        assert traffic is not None, "an all-to-all hop needs a dispatcher that counts its traffic"
        axis = self.axis
        send, receive = self.sizes_of(traffic)
        slots, parcel_routing = self.pack(routing, self.rank_of, send)
        # Choices and weights go ahead of the tokens.
        weights_PK, ids_PK = parcel_routing
        ids_NK = all_to_all_no_grad(ids_PK, send, receive, axis, what="ids")
        weights_NK = all_to_all(weights_PK, send, receive, axis, what="gates")
        arrivals = Routing(weights_NK, ids_NK)
        rows_sent = sum(send) - send[axis.index]
        rows_returned = sum(receive) - receive[axis.index]
        leg = Leg(slots, send, receive)
        return HopPlan(leg, arrivals, rows_sent + rows_returned)

    def out(self, h_TD: Tensor, leg: Leg) -> Tensor:
        gather = self.kernels[gather_rows]
        sent_PD = gather(h_TD, *leg.slots)
        return all_to_all(sent_PD, leg.send, leg.receive, self.axis)

    def back(self, y_ND: Tensor, leg: Leg) -> Tensor:
        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)
        sum_parcels = self.kernels[sum_rows]
        return sum_parcels(returned_PD, *leg.slots)
