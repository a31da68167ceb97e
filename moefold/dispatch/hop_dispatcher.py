"""The dispatcher made of hops: dispatch applies them in order, combine in reverse order.

    all_to_all     one copy of a token for each chosen expert
    dedup          one copy for each distinct rank; rows are built there, and results are summed there before return
    hierarchical   one copy for each distinct node, then one for each distinct rank of the node
    deepep         as dedup, by DeepEP's kernels

Where experts are sharded over etp, one more hop sends the tokens of each etp rank to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moefold.dispatch.base import Hop, Receipt, Routing, RowPolicy, Rows
from moefold.dispatch.traffic import Traffic, TrafficCounter
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.expert_rows import arrange_rows, sum_rows


@dataclass(frozen=True, eq=False)
class HopDispatcher:
    """`traffic`: counts the sizes of all exchanges, for hops that need them on the host."""

    hops: Sequence[Hop]
    row_policy: RowPolicy
    kernels: BoundKernels
    traffic: TrafficCounter | None = None

    def plan(self, routing: Routing) -> Receipt:
        traffic = None
        if self.traffic is not None:
            traffic = self.traffic.count(routing.ids_TK)
        return self.plan_hops(routing, traffic)

    def plan_parts(self, routings: Sequence[Routing]) -> list[Receipt]:
        """Plans of parts of the tokens, whose sizes are exchanged at once."""
        if self.traffic is None:
            return list(map(self.plan, routings))
        ids = [routing.ids_TK for routing in routings]
        traffics = self.traffic.count_parts(ids)
        return list(map(self.plan_hops, routings, traffics))

    def plan_hops(self, routing: Routing, traffic: Traffic | None) -> Receipt:
        tokens = len(routing.ids_TK)
        choices = None
        if traffic is not None:
            choices = traffic.choices_arriving()
        plans = []
        for hop in self.hops:
            plan = hop.plan(routing, traffic)
            routing = plan.routing  # of the arrivals
            choices = plan.choices if choices is None else choices
            plans.append(plan)
        choices_of_parcel = routing.ids_TK.shape[1]
        may_be_remote = choices_of_parcel > 1  # a parcel of one choice is always for an expert here
        if may_be_remote and choices is not None and not self.row_policy.is_padded:
            order = self.row_policy.arrange(routing, self.kernels[arrange_rows], choices)
        else:
            order = self.row_policy.order_by_expert(routing, tokens, may_be_remote, choices)
        legs = tuple(plan.leg for plan in plans)
        rows_moved = sum(plan.rows_moved for plan in plans)
        return Receipt(order, legs, rows_moved)

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        source_ND = self.send(h_TD, receipt)
        return Rows(source_ND, receipt.order)

    def send(self, x_TD: Tensor, receipt: Receipt) -> Tensor:
        for hop, leg in self.outbound(receipt):
            x_TD = hop.out(x_TD, leg)
        return x_TD

    def outbound(self, receipt: Receipt) -> list[tuple[Hop, Any]]:
        """The hops in their order, each with its leg."""
        pairs = zip(self.hops, receipt.legs, strict=True)
        return list(pairs)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        order = receipt.order
        sum_of_sources = self.kernels[sum_rows]
        y_ND = sum_of_sources(y_RD, order.index_R, order.slots_NK, order.holes)
        return self.give_back(y_ND, receipt)

    def give_back(self, y_ND: Tensor, receipt: Receipt) -> Tensor:
        for hop, leg in reversed(self.outbound(receipt)):
            y_ND = hop.back(y_ND, leg)
        return y_ND
