"""The dispatcher made of hops: dispatch applies them in order, combine in reverse order.

    all_to_all     one copy of a token for each chosen expert
    dedup          one copy for each distinct rank; rows are built there, and results are summed there before return
    hierarchical   one copy for each distinct node, then one for each distinct rank of the node
    deepep         as dedup, by DeepEP's kernels

Where experts are sharded over etp, one more hop sends the tokens of each etp rank to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moefold.dispatch.base import Hop, Receipt, Routing, RowPolicy, Rows
from moefold.dispatch.traffic import TrafficCounter
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import sum_rows


class HopDispatcher:
    """`traffic`: counts the sizes of all exchanges, for hops that need them on the host."""

    def __init__(
        self,
        hops: Sequence[Hop],
        row_policy: RowPolicy,
        kernels: BoundKernels,
        traffic: TrafficCounter | None = None,
    ):
        self.hops = hops
        self.row_policy = row_policy
        self.kernels = kernels
        self.traffic = traffic

    def plan(self, routing: Routing) -> Receipt:
        tokens = len(routing.ids_TK)
        traffic = None
        choices = None
        if self.traffic is not None:
            traffic = self.traffic.count(routing.ids_TK)
            choices = traffic.choices_arriving()
        plans = []
        for hop in self.hops:
            plan = hop.plan(routing, traffic)
            routing = plan.routing  # of the arrivals
            choices = plan.choices if choices is None else choices
            plans.append(plan)
        may_be_remote = routing.ids_TK.shape[1] > 1  # a parcel of one choice is always for an expert here
        order = self.row_policy.order_by_expert(routing, tokens, may_be_remote, choices)
        legs = tuple(plan.leg for plan in plans)
        rows_moved = sum(plan.rows_moved for plan in plans)
        return Receipt(order, legs, rows_moved)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        for hop, leg in zip(self.hops, receipt.legs, strict=True):
            h_TD = hop.out(h_TD, leg)
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        order = receipt.order
        sum_of_sources = self.kernels[sum_rows]
        y_ND = sum_of_sources(y_RD, order.index_R, order.slots_NK, order.holes)
        outbound = list(zip(self.hops, receipt.legs, strict=True))
        for hop, leg in reversed(outbound):
            y_ND = hop.back(y_ND, leg)
        return y_ND
