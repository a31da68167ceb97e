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

from moefold.dispatch.base import Receipt, Routing, Rowing, Rows
from moefold.dispatch.deepep import DeepEpHop, make_buffer, require_deepep
from moefold.dispatch.hop import Hop, per_choice, per_rank, to_everyone
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World


class HoppingDispatcher:
    def __init__(self, hops: Sequence[Hop | DeepEpHop], rowing: Rowing, kernels: Kernels):
        self.hops, self.rowing, self.kernels = hops, rowing, kernels

    def plan(self, routing: Routing) -> Receipt:
        ids, gates, legs = routing.ids_TK, routing.probs_TK, []
        for hop in self.hops:
            leg, ids, gates = hop.plan(ids, gates)
            legs.append(leg)
        strangers = ids.shape[1] > 1  # a parcel of one choice is always for an expert here
        return Receipt(self.rowing.arrange(ids, gates, len(routing.ids_TK), strangers), tuple(legs))

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows:
        for hop, leg in zip(self.hops, receipt.legs, strict=True):
            h_TD = hop.out(h_TD, leg)
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor:
        order = receipt.order
        y = self.kernels.sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)
        for hop, leg in zip(reversed(self.hops), reversed(receipt.legs), strict=True):
            y = hop.back(y, leg)
        return y


def made_of_hops(
    name: str, rowing: Rowing, kernels: Kernels, world: World, hidden: int, dtype: torch.dtype
) -> HoppingDispatcher:
    ep, etp = world.axis("ep"), world.axis("etp")
    nodes, inside = world.axis("ep nodes"), world.axis("ep inside")
    held = rowing.held

    def over_ep(ids: torch.Tensor) -> torch.Tensor:
        return ids // held

    def over_nodes(ids: torch.Tensor) -> torch.Tensor:
        return ids // (held * inside.size)

    def inside_node(ids: torch.Tensor) -> torch.Tensor:
        return ids // held % inside.size

    def by_deepep() -> DeepEpHop:
        package = require_deepep(world.device.type, dtype, hidden)
        return DeepEpHop(make_buffer(package, ep, hidden * dtype.itemsize), ep, held)

    made: dict[str, Callable[[], list[Hop | DeepEpHop]]] = {
        "all_to_all": lambda: [Hop(ep, per_choice, over_ep, kernels)],
        "dedup": lambda: [Hop(ep, per_rank, over_ep, kernels)],
        "hierarchical": lambda: [
            Hop(nodes, per_rank, over_nodes, kernels),
            Hop(inside, per_rank, inside_node, kernels),
        ],
        "deepep": lambda: [by_deepep()],
    }
    hops = made[name]()
    if etp.size > 1:
        hops = [*hops, Hop(etp, to_everyone, over_ep, kernels)]
    return HoppingDispatcher(hops, rowing, kernels)
