"""Every rank gets every token, works on the rows of its own experts, and the results are summed and scattered.

Moves T x (n - 1) tokens each way whatever K is, in two plain collectives: good when K is large against the number of
ranks. Expert tensor parallelism needs nothing more: its ranks' partial results are summed in the same scatter.
"""

from __future__ import annotations

import torch

from moefold.comm.collectives import gather, gather_plain, scatter_sum
from moefold.dispatch.base import Receipt, Routing, Rowing, Rows
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World


class AllGatherDispatcher:
    def __init__(self, rowing: Rowing, kernels: Kernels, world: World):
        self.rowing, self.kernels, self.ranks = rowing, kernels, world.axis("ep", "etp")

    def plan(self, routing: Routing) -> Receipt:
        ids_NK, gates_NK = gather_plain(routing.ids_TK, self.ranks), gather(routing.probs_TK, self.ranks)
        return Receipt(self.rowing.arrange(ids_NK, gates_NK, len(routing.ids_TK), strangers=True))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(gather(h_TD, self.ranks), receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        y_ND = self.kernels.sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)
        return scatter_sum(y_ND, self.ranks)
