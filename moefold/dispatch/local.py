"""The reference dispatcher: all experts are on this rank and nothing is sent. All other dispatchers are tested against
it."""

from __future__ import annotations

from torch import Tensor

from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy, Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import arrange_rows, sum_rows


class LocalDispatcher:
    def __init__(self, row_policy: RowPolicy, kernels: BoundKernels):
        self.row_policy = row_policy
        self.arrange_rows = kernels[arrange_rows]
        self.sum_rows = kernels[sum_rows]
        placement = row_policy.experts
        self.experts = placement.experts
        in_order = tuple(range(self.experts))
        self.in_order = placement.positions == in_order
        self.one_row_per_choice = row_policy.one_row_per_choice

    def plan(self, routing: Routing) -> Receipt:
        weights_TK, ids_TK = routing
        if not self.one_row_per_choice:
            tokens = len(ids_TK)
            choices = ids_TK.numel()
            order = self.row_policy.order_by_expert(routing, tokens, most_choices=choices)
            return Receipt(order)
        slots_TK = ids_TK
        if not self.in_order:
            slots_TK = self.row_policy.experts.position_of(ids_TK)
        arranged = self.arrange_rows(slots_TK, weights_TK, self.experts)
        order = RowOrder(*arranged, holes=False)
        return Receipt(order)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        order = receipt.order
        return self.sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)
