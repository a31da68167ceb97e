"""A hop: tokens leave for the ranks of one axis as parcels, and the results come back the same way and are summed.

A packer decides which parcels there are:

    per_choice   one for each chosen expert: what a plain all-to-all sends
    per_rank     one for each distinct rank among a token's experts, with the list of its experts there
    to_everyone  one for each rank of the axis: what expert tensor parallelism needs

Hops follow one another: what arrives is again tokens with choices. T tokens, K choices of a token, P parcels, C parcels
of a token at most, N tokens that arrive, D width. An id of -1 is no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefold.comm.collectives import all_gather_no_grad, all_to_all, all_to_all_no_grad
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
    """One hop's travel plan."""

    index_P: torch.Tensor
    slots_TC: torch.Tensor
    holes: bool
    send: list[int]
    receive: list[int]


RankOf = Callable[[torch.Tensor], torch.Tensor]
Packer = Callable[[torch.Tensor, torch.Tensor, RankOf, int], Parcels]


def pack_per_choice(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
    ids = ids_TK.flatten()
    order = ids.argsort(stable=True)
    order = order[int((ids < 0).sum()) :]  # dropped choices, -1, sort first
    slots = torch.full_like(ids, -1).scatter_(0, order, torch.arange(len(order), device=order.device))
    ids_P, weights_P = ids[order], weights_TK.flatten()[order]
    none = torch.zeros(ranks, dtype=torch.int64, device=ids.device)
    sent = none.scatter_add_(0, rank_of(ids_P), torch.ones_like(ids_P))
    holes = len(order) < len(ids)
    return Parcels(order // ids_TK.shape[1], slots.view(ids_TK.shape), holes, sent, ids_P[:, None], weights_P[:, None])


def pack_per_rank(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
    rank_TK = torch.where(ids_TK >= 0, rank_of(ids_TK), ranks)  # column `ranks` collects what goes nowhere
    goes_nT = torch.zeros(ranks + 1, len(ids_TK), dtype=torch.bool, device=ids_TK.device)
    goes_nT = goes_nT.scatter_(0, rank_TK.T, True)[:ranks]
    rank_P, token_P = goes_nT.nonzero(as_tuple=True)
    slots_Tn = torch.full((len(ids_TK), ranks), -1, device=ids_TK.device)
    slots_Tn[token_P, rank_P] = torch.arange(len(token_P), device=ids_TK.device)
    meant_PK = rank_TK[token_P] == rank_P[:, None]
    ids_PK = torch.where(meant_PK, ids_TK[token_P], -1)
    return Parcels(token_P, slots_Tn, True, goes_nT.sum(1), ids_PK, weights_TK[token_P])


def pack_for_everyone(ids_TK: torch.Tensor, weights_TK: torch.Tensor, rank_of: RankOf, ranks: int) -> Parcels:
    tokens = len(ids_TK)
    index_P = torch.arange(tokens, device=ids_TK.device).repeat(ranks)
    slots_Tn = torch.arange(ranks * tokens, device=ids_TK.device).view(ranks, tokens).T
    sent = torch.full((ranks,), tokens, device=ids_TK.device)
    return Parcels(index_P, slots_Tn, False, sent, ids_TK.repeat(ranks, 1), weights_TK.repeat(ranks, 1))


class Hop:
    def __init__(self, axis: Axis, pack: Packer, rank_of: RankOf, kernels: BoundKernels):
        self.axis, self.pack, self.rank_of, self.kernels = axis, pack, rank_of, kernels

    def plan(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[Leg, torch.Tensor, torch.Tensor]:
        """The leg, and the choices of the tokens that will arrive. Waits for the device: sizes must be known."""
        parcels = self.pack(ids_TK, weights_TK, self.rank_of, self.axis.size)
        sent_nn = all_gather_no_grad(parcels.sent_n[None], self.axis).tolist()
        send, receive = sent_nn[self.axis.index], [row[self.axis.index] for row in sent_nn]
        leg = Leg(parcels.index_P, parcels.slots_TC, parcels.holes, send, receive)
        ids_NK = all_to_all_no_grad(parcels.ids_PK, send, receive, self.axis, what="ids")
        weights_NK = all_to_all(parcels.weights_PK, send, receive, self.axis, what="gates")
        return leg, ids_NK, weights_NK

    def out(self, h_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        sent_PD = self.kernels[gather_rows](h_TD, leg.index_P, leg.slots_TC, leg.holes)
        return all_to_all(sent_PD, leg.send, leg.receive, self.axis)

    def back(self, y_ND: torch.Tensor, leg: Leg) -> torch.Tensor:
        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)
        return self.kernels[sum_rows](returned_PD, leg.index_P, leg.slots_TC, leg.holes)
