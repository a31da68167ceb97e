"""The reference dispatcher: all experts are here, nothing travels. Every other dispatcher must agree with it."""

from __future__ import annotations

import torch

from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy, Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.arrange_rows import arrange_rows
from moefold.kernels.routing.gather_rows import sum_rows


class LocalDispatcher:
    def __init__(self, row_policy: RowPolicy, kernels: BoundKernels):
        self.row_policy, self.kernels = row_policy, kernels

    def plan(self, routing: Routing) -> Receipt:
        if self.row_policy.one_row_per_choice:
            arranged = self.kernels[arrange_rows](routing.ids_TK, routing.weights_TK, self.row_policy.held)
            return Receipt(RowOrder(*arranged, holes=False))
        return Receipt(self.row_policy.order_by_expert(routing.ids_TK, routing.weights_TK, len(routing.ids_TK)))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        return self.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)
