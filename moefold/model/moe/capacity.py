"""Experts with a limit: choices beyond an expert's capacity are dropped, and those tokens pass it by on the residual.

    capacity = capacity factor x tokens x K / E

counted over the tokens of one rank (sub-sequence) or over all ranks that share the sequences (full sequence). With
device capacity it is a group of experts that is full together, with as many times the capacity as it has experts.

T tokens of this rank, N tokens that are counted, E experts, K choices.
"""

from __future__ import annotations

import torch

from moefold.comm.collectives import all_gather_no_grad
from moefold.config.run import MoeConfig
from moefold.dispatch.base import Routing
from moefold.dispatch.build import expert_capacity
from moefold.layout.axes import Axis
from moefold.model.token_layout import TokenShard


def drop_beyond_capacity(routing: Routing, moe: MoeConfig, share: TokenShard, over: Axis) -> Routing:
    """The routing with choices beyond capacity made -1, with the weight zero."""
    if moe.capacity.factor == 0 or moe.router.kind == "expert_choice":  # experts that choose take no more than they can
        return routing
    whole = moe.capacity.over == "full_sequence"
    ids_TK, first = routing.ids_TK, over.index * len(routing.ids_TK) if whole else 0
    liking_TK = (
        routing.weights_TK.detach()
        if moe.capacity.drop == "probability"
        else -share.position_rank_T[:, None].expand_as(ids_TK)
    )
    ids_NK, liking_NK = (all_gather_no_grad(x, over) if whole else x for x in (ids_TK, liking_TK.contiguous()))
    held = moe.experts // moe.balance.devices if moe.capacity.per_device else 1  # experts that are full together
    most = expert_capacity(moe, len(ids_NK)) * held
    keep_NK = within_capacity(ids_NK.div(held, rounding_mode="floor"), liking_NK, moe.experts // held, most)
    keep_TK = keep_NK[first : first + len(ids_TK)]
    return Routing(routing.weights_TK * keep_TK, torch.where(keep_TK, ids_TK, -1))


def within_capacity(ids_NK: torch.Tensor, liking_NK: torch.Tensor, experts: int, most: int) -> torch.Tensor:
    """Which choices are among the `most` best liked of their expert; of equals, the earlier. -1 is no choice."""
    ids, liking = ids_NK.flatten(), liking_NK.flatten()
    ids = torch.where(ids >= 0, ids, experts)  # behind all others, and never full
    by_liking = liking.argsort(descending=True, stable=True)
    order = by_liking[ids[by_liking].argsort(stable=True)]  # by expert, and within it by liking
    begins_E = torch.searchsorted(ids[order], torch.arange(experts + 1, device=ids.device))
    place = torch.arange(len(order), device=ids.device) - begins_E[ids[order]]
    return torch.zeros_like(ids, dtype=torch.bool).scatter_(0, order, place < most).view(ids_NK.shape)
