"""The reference dispatcher: all experts are here, nothing travels. Every other dispatcher must agree with it."""

from __future__ import annotations

import torch

from moefold.dispatch.base import Receipt, Routing, Rows
from moefold.kernels.bind import Kernels


class LocalDispatcher:
    """Sorts rows by expert, stably and without atomics, so that two runs give one result."""

    def __init__(self, experts: int, kernels: Kernels):
        self.experts, self.kernels = experts, kernels

    def plan(self, routing: Routing) -> Receipt:
        ids_R = routing.ids_TK.flatten()
        order_R = ids_R.argsort(stable=True)
        slots_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        every_expert = torch.arange(self.experts, device=ids_R.device)
        return Receipt(
            index_R=order_R // routing.ids_TK.shape[1],
            slots_NK=slots_R.view(routing.ids_TK.shape),
            gate_R=routing.probs_TK.flatten()[order_R],
            offsets_e=torch.searchsorted(ids_R[order_R], every_expert, right=True).int(),
        )

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, *receipt)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        return self.kernels.sum_rows(y_RD, receipt.index_R, receipt.slots_NK)
