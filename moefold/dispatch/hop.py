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
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all, all_to_all_no_grad
from moefold.dispatch.base import HopPlan, Routing
from moefold.dispatch.traffic import ExchangeSizes, Traffic
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import gather_rows, sum_rows
from moefold.layout.axes import Axis


class Parcels(NamedTuple):
    """Parcels, sorted by destination. `index_P`: token of each parcel; `slots_TC`: parcels of each token (-1: none,
    with `holes`); `routing`: choices and weights of the parcels."""

    index_P: Tensor
    slots_TC: Tensor
    holes: bool
    routing: Routing


class Leg(NamedTuple):
    """The send plan of one hop: parcels of each token, and the numbers of parcels sent to and received from each
    rank."""

    index_P: Tensor
    slots_TC: Tensor
    holes: bool
    send: list[int]
    receive: list[int]


RankOf = Callable[[Tensor], Tensor]
SizesOf = Callable[[Traffic], ExchangeSizes]
Packer = Callable[[Routing, RankOf, list[int]], Parcels]  # the last: parcels for each rank


def pack_per_choice(routing: Routing, rank_of: RankOf, send: list[int]) -> Parcels:
    weights_TK, ids_TK = routing
    ids = ids_TK.flatten()
    weights = weights_TK.flatten()
    parcels = sum(send)
    ranks = len(send)
    rank = torch.where(ids >= 0, rank_of(ids), ranks)  # missing choices sort last
    order = rank.argsort(stable=True)[:parcels]
    number = torch.arange(parcels, device=order.device)
    none = torch.full_like(ids, -1)
    slots = none.scatter_(0, order, number)
    # A parcel is one choice: its token, its expert and its weight.
    token_P = order // ids_TK.shape[1]
    ids_P1 = ids[order][:, None]
    weights_P1 = weights[order][:, None]
    parcel_routing = Routing(weights_P1, ids_P1)
    slots_TK = slots.view(ids_TK.shape)
    holes = parcels < len(ids)
    return Parcels(token_P, slots_TK, holes, parcel_routing)


def pack_per_rank(routing: Routing, rank_of: RankOf, send: list[int]) -> Parcels:
    weights_TK, ids_TK = routing
    tokens = len(ids_TK)
    ranks = len(send)
    parcels = sum(send)
    device = ids_TK.device
    rank_TK = torch.where(ids_TK >= 0, rank_of(ids_TK), ranks)  # row `ranks` of `goes_nT` collects missing choices
    goes_nT = ids_TK.new_zeros(ranks + 1, tokens, dtype=torch.bool)
    goes_nT = goes_nT.scatter_(0, rank_TK.T, True)[:ranks]
    # Parcels are numbered rank by rank; a last place takes what is not sent.
    goes = goes_nT.flatten()
    number = goes.cumsum(0) - 1
    place = torch.where(goes, number, parcels)
    sent = torch.empty(parcels + 1, dtype=torch.int64, device=device)
    every = torch.arange(ranks * tokens, device=device)
    sent_P = sent.scatter_(0, place, every)[:parcels]
    rank_P = sent_P.div(max(tokens, 1), rounding_mode="floor")
    token_P = sent_P - rank_P * tokens
    slots = torch.where(goes, number, -1)
    slots_nT = slots.view(ranks, tokens)
    # A parcel lists the choices that its rank holds, -1 in place of the others.
    held_there_PK = rank_TK[token_P] == rank_P[:, None]
    ids_PK = torch.where(held_there_PK, ids_TK[token_P], -1)
    parcel_routing = Routing(weights_TK[token_P], ids_PK)
    slots_Tn = slots_nT.T.contiguous()
    return Parcels(token_P, slots_Tn, True, parcel_routing)


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
    return Parcels(token_P, slots_nT.T, False, parcel_routing)


class AllToAllHop:
    """A hop over one axis by all-to-all collectives. `rank_of` maps expert ids to ranks of the axis, `sizes_of` the
    traffic of the layer to the sizes of this exchange."""

    def __init__(self, axis: Axis, pack: Packer, rank_of: RankOf, sizes_of: SizesOf, kernels: BoundKernels):
        self.axis = axis
        self.pack = pack
        self.rank_of = rank_of
        self.sizes_of = sizes_of
        self.kernels = kernels

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan:
        assert traffic is not None, "an all-to-all hop needs a dispatcher that counts its traffic"
        axis = self.axis
        send, receive = self.sizes_of(traffic)
        parcels = self.pack(routing, self.rank_of, send)
        leg = Leg(parcels.index_P, parcels.slots_TC, parcels.holes, send, receive)
        # Choices and weights go ahead of the tokens.
        weights_PK, ids_PK = parcels.routing
        ids_NK = all_to_all_no_grad(ids_PK, send, receive, axis, what="ids")
        weights_NK = all_to_all(weights_PK, send, receive, axis, what="gates")
        arrivals = Routing(weights_NK, ids_NK)
        rows_sent = sum(send) - send[axis.index]
        rows_returned = sum(receive) - receive[axis.index]
        return HopPlan(leg, arrivals, rows_sent + rows_returned)

    def out(self, h_TD: Tensor, leg: Leg) -> Tensor:
        gather = self.kernels[gather_rows]
        sent_PD = gather(h_TD, leg.index_P, leg.slots_TC, leg.holes)
        return all_to_all(sent_PD, leg.send, leg.receive, self.axis)

    def back(self, y_ND: Tensor, leg: Leg) -> Tensor:
        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)
        sum_parcels = self.kernels[sum_rows]
        return sum_parcels(returned_PD, leg.index_P, leg.slots_TC, leg.holes)
