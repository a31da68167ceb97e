"""The all-to-all hop: copies of tokens ("parcels") are sent to the ranks of one axis; results return and are summed.

A packer decides which parcels there are:

    per_choice    one for each chosen expert: a plain all-to-all
    per_rank      one for each distinct rank among a token's experts, with the list of its experts there
    for_everyone  one for each rank of the axis: for expert tensor parallelism

T tokens, K choices of a token, P parcels, C parcels of a token at most, N tokens that arrive, n ranks of the axis,
D width. An id of -1 is no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefold.comm.collectives import all_gather_no_grad, all_to_all, all_to_all_no_grad
from moefold.dispatch.base import HopPlan
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.gather_rows import gather_rows, sum_rows
from moefold.layout.axes import Axis


class Parcels(NamedTuple):
    """Sorted by destination. `index_P` is a parcel's token, `slots_TC` a token's parcels (-1: none, with `holes`)."""

    index_P: torch.Tensor
    slots_TC: torch.Tensor
    holes: bool
    sent_n: torch.Tensor
    ids_PK: torch.Tensor
    weights_PK: torch.Tensor


class Leg(NamedTuple):
    """The send plan of one hop: parcels of each token, and how many parcels go to and come from each rank."""

    index_P: torch.Tensor
    slots_TC: torch.Tensor
    holes: bool
    send: list[int]
    receive: list[int]


RankOf = Callable[[torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor, torch.Tensor, RankOf, int], Parcels]


def pack_per_choice(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
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
    token_P = order // ids_TK.shape[1]
    ids_P1 = ids[order][:, None]
    weights_P1 = weights[order][:, None]
    return Parcels(token_P, slots.view(ids_TK.shape), dropped > 0, sent_n, ids_P1, weights_P1)


def pack_per_rank(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
    tokens = len(ids_TK)
    rank_TK = torch.where(ids_TK >= 0, rank_of(ids_TK), ranks)  # row `ranks` of `goes_nT` collects missing choices
    goes_nT = torch.zeros(ranks + 1, tokens, dtype=torch.bool, device=ids_TK.device)
    goes_nT = goes_nT.scatter_(0, rank_TK.T, True)[:ranks]
    rank_P, token_P = goes_nT.nonzero(as_tuple=True)
    slots_Tn = torch.full((tokens, ranks), -1, device=ids_TK.device)
    slots_Tn[token_P, rank_P] = torch.arange(len(token_P), device=ids_TK.device)
    # A parcel lists the choices that its rank holds, -1 in place of the others.
    held_there_PK = rank_TK[token_P] == rank_P[:, None]
    ids_PK = torch.where(held_there_PK, ids_TK[token_P], -1)
    return Parcels(token_P, slots_Tn, True, goes_nT.sum(1), ids_PK, weights_TK[token_P])


def pack_for_everyone(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
    tokens = len(ids_TK)
    device = ids_TK.device
    token_P = torch.arange(tokens, device=device).repeat(ranks)
    slots_nT = torch.arange(ranks * tokens, device=device).view(ranks, tokens)
    sent_n = torch.full((ranks,), tokens, device=device)
    ids_PK = ids_TK.repeat(ranks, 1)
    weights_PK = weights_TK.repeat(ranks, 1)
    return Parcels(token_P, slots_nT.T, False, sent_n, ids_PK, weights_PK)


class AllToAllHop:
    """A hop over one axis by all-to-all collectives. `rank_of` maps expert ids to ranks of the axis."""

    def __init__(self, axis: Axis, pack: Packer, rank_of: RankOf, kernels: BoundKernels):
        self.axis = axis
        self.pack = pack
        self.rank_of = rank_of
        self.kernels = kernels

    def plan(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> HopPlan:
        """Waits for the device: the sizes of the all-to-all must be known to the host."""
        axis = self.axis
        parcels = self.pack(ids_TK, weights_TK, self.rank_of, axis.size)
        sent_nn = all_gather_no_grad(parcels.sent_n[None], axis).tolist()
        send = sent_nn[axis.index]
        receive = [row[axis.index] for row in sent_nn]
        leg = Leg(parcels.index_P, parcels.slots_TC, parcels.holes, send, receive)
        ids_NK = all_to_all_no_grad(parcels.ids_PK, send, receive, axis, what="ids")
        weights_NK = all_to_all(parcels.weights_PK, send, receive, axis, what="gates")
        rows_sent = sum(send) - send[axis.index]
        rows_returned = sum(receive) - receive[axis.index]
        return HopPlan(leg, ids_NK, weights_NK, rows_sent, rows_returned)

    def out(self, h_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        sent_PD = self.kernels[gather_rows](h_TD, leg.index_P, leg.slots_TC, leg.holes)
        return all_to_all(sent_PD, leg.send, leg.receive, self.axis)

    def back(self, y_ND: torch.Tensor, leg: Leg) -> torch.Tensor:
        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)
        return self.kernels[sum_rows](returned_PD, leg.index_P, leg.slots_TC, leg.holes)
