"""Dispatchers made of hops: one after the other on the way out, in reverse on the way back.

    all_to_all     every row to its expert's rank
    dedup          a token once to each distinct rank; rows are described there, and results summed there before return
    hierarchical   a token once to each distinct node, then once to each distinct rank inside it
    deepep         a token once to each distinct rank, by DeepEP's kernels

each followed, where experts are cut over etp, by a hop that gives every etp rank the tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moefold.dispatch.base import Receipt, Routing, RowPolicy, Rows
from moefold.dispatch.deepep import DeepEpHop, make_deepep_buffer, require_deepep
from moefold.dispatch.hop import Hop, pack_for_everyone, pack_per_choice, pack_per_rank
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.gather_rows import sum_rows
from moefold.layout.axes import World


class HopDispatcher:
    def __init__(self, hops: Sequence[Hop | DeepEpHop], row_policy: RowPolicy, kernels: BoundKernels):
        self.hops, self.row_policy, self.kernels = hops, row_policy, kernels

    def plan(self, routing: Routing) -> Receipt:
        ids, weights, legs = routing.ids_TK, routing.weights_TK, []
        for hop in self.hops:
            leg, ids, weights = hop.plan(ids, weights)
            legs.append(leg)
        may_be_remote = ids.shape[1] > 1  # a parcel of one choice is always for an expert here
        return Receipt(self.row_policy.order_by_expert(ids, weights, len(routing.ids_TK), may_be_remote), tuple(legs))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        for hop, leg in zip(self.hops, receipt.legs, strict=True):
            h_TD = hop.out(h_TD, leg)
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        y = self.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)
        for hop, leg in zip(reversed(self.hops), reversed(receipt.legs), strict=True):
            y = hop.back(y, leg)
        return y


def build_hop_dispatcher(
    name: str, row_policy: RowPolicy, kernels: BoundKernels, world: World, hidden: int, dtype: torch.dtype
) -> HopDispatcher:
    ep, etp = world.axis("ep"), world.axis("etp")
    nodes, inside = world.axis("ep nodes"), world.axis("ep inside")
    held = row_policy.held

    def ep_rank_of_expert(ids: torch.Tensor) -> torch.Tensor:
        return ids // held

    def node_of_expert(ids: torch.Tensor) -> torch.Tensor:
        return ids // (held * inside.size)

    def rank_within_node(ids: torch.Tensor) -> torch.Tensor:
        return ids // held % inside.size

    def make_deepep_hop() -> DeepEpHop:
        package = require_deepep(world.device.type, dtype, hidden)
        return DeepEpHop(make_deepep_buffer(package, ep, hidden * dtype.itemsize), ep, held)

    made: dict[str, Callable[[], list[Hop | DeepEpHop]]] = {
        "all_to_all": lambda: [Hop(ep, pack_per_choice, ep_rank_of_expert, kernels)],
        "dedup": lambda: [Hop(ep, pack_per_rank, ep_rank_of_expert, kernels)],
        "hierarchical": lambda: [
            Hop(nodes, pack_per_rank, node_of_expert, kernels),
            Hop(inside, pack_per_rank, rank_within_node, kernels),
        ],
        "deepep": lambda: [make_deepep_hop()],
    }
    hops = made[name]()
    if etp.size > 1:
        hops = [*hops, Hop(etp, pack_for_everyone, ep_rank_of_expert, kernels)]
    return HopDispatcher(hops, row_policy, kernels)
