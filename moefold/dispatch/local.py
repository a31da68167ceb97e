"""The reference dispatcher: all experts are here, nothing travels. Every other dispatcher must agree with it."""

from __future__ import annotations

import torch

from moefold.dispatch.base import Order, Receipt, Routing, Rowing, Rows
from moefold.kernels.bind import Kernels


class LocalDispatcher:
    def __init__(self, rowing: Rowing, kernels: Kernels):
        self.rowing, self.kernels = rowing, kernels

    def plan(self, routing: Routing) -> Receipt:
        if self.rowing.plain:
            arranged = self.kernels.arrange_rows(routing.ids_TK, routing.probs_TK, self.rowing.held)
            return Receipt(Order(*arranged, holes=False))
        return Receipt(self.rowing.arrange(routing.ids_TK, routing.probs_TK, len(routing.ids_TK)))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        return self.kernels.sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)
