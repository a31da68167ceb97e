"""Every rank gets every token, works on the rows of its own experts, and the results are summed and scattered.

Moves T x (n - 1) tokens each way whatever K is, in two plain collectives: good when K is large against the number of
ranks. Expert tensor parallelism needs nothing more: its ranks' partial results are summed in the same scatter.
"""

from __future__ import annotations

import torch

from moefold.comm.collectives import all_gather, all_gather_no_grad, reduce_scatter
from moefold.dispatch.base import Receipt, Routing, RowPolicy, Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.gather_rows import sum_rows
from moefold.layout.axes import World


class AllGatherDispatcher:
    def __init__(self, row_policy: RowPolicy, kernels: BoundKernels, world: World):
        self.row_policy, self.kernels, self.ranks = row_policy, kernels, world.axis("ep", "etp")

    def plan(self, routing: Routing) -> Receipt:
        ids_NK, weights_NK = all_gather_no_grad(routing.ids_TK, self.ranks), all_gather(routing.weights_TK, self.ranks)
        return Receipt(self.row_policy.order_by_expert(ids_NK, weights_NK, len(routing.ids_TK), may_be_remote=True))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(all_gather(h_TD, self.ranks), receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        y_ND = self.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)
        return reduce_scatter(y_ND, self.ranks)
