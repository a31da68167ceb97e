"""The all-gather dispatcher: every rank gathers all tokens, computes the rows of its own experts, and results are
reduce-scattered.

T x (n - 1) tokens are sent in each direction, independent of K, in two plain collectives: efficient where K is large
against the number of ranks. Expert tensor parallelism needs no separate hop: partial results are summed in the same
reduce-scatter.
"""

from __future__ import annotations

from torch import Tensor

from moefold.comm.collectives import all_gather, all_gather_no_grad, reduce_scatter
from moefold.dispatch.base import Receipt, Routing, RowPolicy, Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import sum_rows
from moefold.layout.axes import World


class AllGatherDispatcher:
    def __init__(self, row_policy: RowPolicy, kernels: BoundKernels, world: World):
        self.row_policy = row_policy
        self.kernels = kernels
        self.ranks = world.ep_etp

    def plan(self, routing: Routing) -> Receipt:
        tokens = len(routing.ids_TK)
        ids_NK = all_gather_no_grad(routing.ids_TK, self.ranks)
        weights_NK = all_gather(routing.weights_TK, self.ranks)
        gathered = Routing(weights_NK, ids_NK)
        order = self.row_policy.order_by_expert(gathered, tokens, may_be_remote=True)
        others = self.ranks.size - 1
        copies = tokens * others
        return Receipt(order, rows_moved=2 * copies)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        source_ND = self.send(h_TD, receipt)
        return Rows(source_ND, receipt.order)

    def send(self, x_TD: Tensor, receipt: Receipt) -> Tensor:
        return all_gather(x_TD, self.ranks)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        order = receipt.order
        sum_of_sources = self.kernels[sum_rows]
        y_ND = sum_of_sources(y_RD, order.index_R, order.slots_NK, order.holes)
        return self.give_back(y_ND, receipt)

    def give_back(self, y_ND: Tensor, receipt: Receipt) -> Tensor:
        return reduce_scatter(y_ND, self.ranks)
