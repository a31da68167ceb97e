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
    experts_choose = moe.router.kind == "expert_choice"
    return moe.capacity.factor > 0 and not experts_choose


def drop_beyond_capacity(routing: Routing, moe: MoeConfig, share: TokenShard, over: Axis) -> Routing:
    """The routing with choices beyond capacity made -1, with weight zero."""
    ids_TK = routing.ids_TK
    tokens = len(ids_TK)
    priority_TK = keep_priority(routing, moe, share)
    # Experts that are full together count as one.
    grouped = 1
    if moe.capacity.per_device:
        grouped = moe.experts // moe.balance.devices
    groups = moe.experts // grouped
    group_TK = ids_TK.div(grouped, rounding_mode="floor")
    if moe.capacity.over == "full_sequence":  # an expert is another one for each sequence
        sequence_T1 = share.sequence_index_T[:, None]
        own_group_TK = group_TK + sequence_T1 * groups
        is_chosen_TK = ids_TK >= 0
        group_TK = torch.where(is_chosen_TK, own_group_TK, -1)
        group_NK = all_gather_no_grad(group_TK, over)
        priority_NK = all_gather_no_grad(priority_TK, over)
        first = over.index * tokens
        groups *= share.sequences
        capacity = expert_capacity(moe, share.length)
    else:
        group_NK = group_TK
        priority_NK = priority_TK
        first = 0
        capacity = expert_capacity(moe, tokens)
    limit = capacity * grouped
    keep_NK = within_capacity(group_NK, priority_NK, groups, limit)
    # of the counted tokens this rank's own
    end = first + tokens
    keep_TK = keep_NK[first:end]
    kept_ids_TK = torch.where(keep_TK, ids_TK, -1)
    weights_TK = routing.weights_TK * keep_TK
    return Routing(weights_TK, kept_ids_TK)


def keep_priority(routing: Routing, moe: MoeConfig, share: TokenShard) -> Tensor:
    """The higher, the sooner a choice is kept: its router weight, or its position in the sequence, early ones first."""
    if moe.capacity.drop == "probability":
        weights_TK = routing.weights_TK.detach()
        return weights_TK.contiguous()
    position_T = share.position_rank_T
    earliest_first_T1 = -position_T[:, None]
    priority_TK = earliest_first_T1.expand_as(routing.ids_TK)
    return priority_TK.contiguous()


def within_capacity(ids_NK: Tensor, priority_NK: Tensor, experts: int, limit: int) -> Tensor:
    """Which choices are among the first `limit` of their expert by priority; of equals, the earlier."""
    ids = ids_NK.flatten()
    device = ids.device
    is_chosen = ids >= 0
    ids = torch.where(is_chosen, ids, experts)  # sorts behind all others, and is never full
    # By expert, and within an expert by priority.
    priority = priority_NK.flatten()
    by_priority = priority.argsort(descending=True, stable=True)
    ids_by_priority = ids[by_priority]
    by_expert = ids_by_priority.argsort(stable=True)
    order = by_priority[by_expert]
    # The place of each choice within its expert.
    sorted_ids = ids[order]
    every_expert = torch.arange(experts + 1, device=device)
    begins_E = torch.searchsorted(sorted_ids, every_expert)
    begin = begins_E[sorted_ids]
    row = torch.arange(len(order), device=device)
    is_within = row - begin < limit
    keep = torch.zeros_like(is_within)
    keep.scatter_(0, order, is_within)
    return keep.view(ids_NK.shape)
