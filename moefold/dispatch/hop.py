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

from moefold.comm.collectives import all_gather_no_grad, all_to_all, all_to_all_no_grad
from moefold.dispatch.base import HopPlan, Routing
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import gather_rows, sum_rows
from moefold.layout.axes import Axis


class Parcels(NamedTuple):
    """Parcels, sorted by destination. `index_P`: token of each parcel; `slots_TC`: parcels of each token (-1: none,
    with `holes`); `sent_n`: parcels for each rank; `routing`: choices and weights of the parcels."""

    index_P: Tensor
    slots_TC: Tensor
    holes: bool
    sent_n: Tensor
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
Packer = Callable[[Routing, RankOf, int], Parcels]


def pack_per_choice(routing: Routing, rank_of: RankOf, ranks: int) -> Parcels:
    weights_TK, ids_TK = routing
    ids = ids_TK.flatten()
    weights = weights_TK.flatten()
    rank = torch.where(ids >= 0, rank_of(ids), -1)
    order = rank.argsort(stable=True)
    dropped = int((ids < 0).sum())  # they sort first
    order = order[dropped:]
    number = torch.arange(len(order), device=order.device)
    slots = torch.full_like(ids, -1).scatter_(0, order, number)
    rank_P = rank[order]
    sent_n = torch.zeros(ranks, dtype=torch.int64, device=ids.device)
    sent_n.scatter_add_(0, rank_P, torch.ones_like(rank_P))
    # A parcel is one choice: its token, its expert and its weight.
    token_P = order // ids_TK.shape[1]
    ids_P1 = ids[order][:, None]
    weights_P1 = weights[order][:, None]
    parcel_routing = Routing(weights_P1, ids_P1)
    slots_TK = slots.view(ids_TK.shape)
    return Parcels(token_P, slots_TK, dropped > 0, sent_n, parcel_routing)


def pack_per_rank(routing: Routing, rank_of: RankOf, ranks: int) -> Parcels:
    weights_TK, ids_TK = routing
    tokens = len(ids_TK)
    rank_TK = torch.where(ids_TK >= 0, rank_of(ids_TK), ranks)  # row `ranks` of `goes_nT` collects missing choices
    goes_nT = ids_TK.new_zeros(ranks + 1, tokens, dtype=torch.bool)
    goes_nT = goes_nT.scatter_(0, rank_TK.T, True)[:ranks]
    rank_P, token_P = goes_nT.nonzero(as_tuple=True)
    slots_Tn = torch.full((tokens, ranks), -1, device=ids_TK.device)
    parcel_P = torch.arange(len(token_P), device=ids_TK.device)
    slots_Tn[token_P, rank_P] = parcel_P
    # A parcel lists the choices that its rank holds, -1 in place of the others.
    held_there_PK = rank_TK[token_P] == rank_P[:, None]
    ids_PK = torch.where(held_there_PK, ids_TK[token_P], -1)
    parcel_routing = Routing(weights_TK[token_P], ids_PK)
    return Parcels(token_P, slots_Tn, True, goes_nT.sum(1), parcel_routing)


def pack_for_everyone(routing: Routing, rank_of: RankOf, ranks: int) -> Parcels:
    weights_TK, ids_TK = routing
    tokens = len(ids_TK)
    device = ids_TK.device
    token_P = torch.arange(tokens, device=device).repeat(ranks)
    parcel_P = torch.arange(ranks * tokens, device=device)
    slots_nT = parcel_P.view(ranks, tokens)
    sent_n = torch.full((ranks,), tokens, device=device)
    weights_PK = weights_TK.repeat(ranks, 1)
    ids_PK = ids_TK.repeat(ranks, 1)
    parcel_routing = Routing(weights_PK, ids_PK)
    return Parcels(token_P, slots_nT.T, False, sent_n, parcel_routing)


class AllToAllHop:
    """A hop over one axis by all-to-all collectives. `rank_of` maps expert ids to ranks of the axis."""

    def __init__(self, axis: Axis, pack: Packer, rank_of: RankOf, kernels: BoundKernels):
        self.axis = axis
        self.pack = pack
        self.rank_of = rank_of
        self.kernels = kernels

    def plan(self, routing: Routing) -> HopPlan:
        """The send plan. Waits for the device: the host must know the sizes of the all-to-all."""
        axis = self.axis
        parcels = self.pack(routing, self.rank_of, axis.size)
        # Every rank learns how many parcels go from each rank to each.
        sent_nn = all_gather_no_grad(parcels.sent_n[None], axis).tolist()
        send = sent_nn[axis.index]
        receive = [row[axis.index] for row in sent_nn]
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
