"""Expert capacity: choices beyond an expert's capacity are dropped; those tokens keep their residual only.

    capacity = capacity factor x tokens x K / E

counted over the tokens of one rank (sub-sequence) or over each sequence, on all ranks that share it (full sequence).
With device capacity, a group of experts is full together: its capacity is the sum of its experts'.

T tokens of this rank, N tokens that are counted, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_no_grad
from moefold.config.run import MoeConfig
from moefold.dispatch.base import Routing
from moefold.dispatch.build import expert_capacity
from moefold.layout.axes import Axis
from moefold.model.token_layout import TokenShard


def drops_choices(moe: MoeConfig) -> bool:
    """Whether choices can be dropped after the router has made them. Expert choice keeps to the capacity by itself."""
    return moe.capacity.factor > 0 and moe.router.kind != "expert_choice"


def drop_beyond_capacity(routing: Routing, moe: MoeConfig, share: TokenShard, over: Axis) -> Routing:
    """The routing with choices beyond capacity made -1, with weight zero."""
    ids_TK = routing.ids_TK
    priority_TK = keep_priority(routing, moe, share)
    # Experts that are full together count as one.
    grouped = moe.experts // moe.balance.devices if moe.capacity.per_device else 1
    groups = moe.experts // grouped
    group_TK = ids_TK.div(grouped, rounding_mode="floor")
    if moe.capacity.over == "full_sequence":  # an expert is another one for each sequence
        first_group_T1 = share.sequence_index_T[:, None] * groups
        group_TK = torch.where(ids_TK >= 0, group_TK + first_group_T1, -1)
        group_NK = all_gather_no_grad(group_TK, over)
        priority_NK = all_gather_no_grad(priority_TK, over)
        first = over.index * len(ids_TK)
        groups *= share.sequences
        limit = expert_capacity(moe, share.length) * grouped
    else:
        group_NK = group_TK
        priority_NK = priority_TK
        first = 0
        limit = expert_capacity(moe, len(ids_TK)) * grouped
    keep_NK = within_capacity(group_NK, priority_NK, groups, limit)
    keep_TK = keep_NK[first : first + len(ids_TK)]
    kept_ids_TK = torch.where(keep_TK, ids_TK, -1)
    return Routing(routing.weights_TK * keep_TK, kept_ids_TK)


def keep_priority(routing: Routing, moe: MoeConfig, share: TokenShard) -> Tensor:
    """The higher, the sooner a choice is kept: its router weight, or its position in the sequence, early ones first."""
    if moe.capacity.drop == "probability":
        return routing.weights_TK.detach().contiguous()
    position_T1 = share.position_rank_T[:, None]
    return (-position_T1.expand_as(routing.ids_TK)).contiguous()


def within_capacity(ids_NK: Tensor, priority_NK: Tensor, experts: int, limit: int) -> Tensor:
    """Which choices are among the first `limit` of their expert by priority; of equals, the earlier."""
    ids = ids_NK.flatten()
    ids = torch.where(ids >= 0, ids, experts)  # sorts behind all others, and is never full
    # By expert, and within an expert by priority.
    by_priority = priority_NK.flatten().argsort(descending=True, stable=True)
    by_expert = ids[by_priority].argsort(stable=True)
    order = by_priority[by_expert]
    sorted_ids = ids[order]
    every_expert = torch.arange(experts + 1, device=ids.device)
    begins_E = torch.searchsorted(sorted_ids, every_expert)
    row = torch.arange(len(order), device=ids.device)
    place = row - begins_E[sorted_ids]  # within the expert
    keep = torch.zeros_like(ids, dtype=torch.bool)
    keep.scatter_(0, order, place < limit)
    return keep.view(ids_NK.shape)
