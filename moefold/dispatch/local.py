"""The reference dispatcher: all experts are on this rank and nothing is sent. All other dispatchers agree with it."""

from __future__ import annotations

import torch

from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy, Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.arrange_rows import arrange_rows
from moefold.kernels.routing.gather_rows import sum_rows


class LocalDispatcher:
    def __init__(self, row_policy: RowPolicy, kernels: BoundKernels):
        self.row_policy = row_policy
        self.kernels = kernels
        self.in_order = row_policy.experts.positions == tuple(range(row_policy.experts.experts))

    def plan(self, routing: Routing) -> Receipt:
        policy = self.row_policy
        ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
        if not policy.one_row_per_choice:
            order = policy.order_by_expert(ids_TK, weights_TK, len(ids_TK))
            return Receipt(order)
        slots_TK = ids_TK if self.in_order else policy.experts.position_of(ids_TK)
        arranged = self.kernels[arrange_rows](slots_TK, weights_TK, policy.held)
        return Receipt(RowOrder(*arranged, holes=False))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        return self.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)
