"""Packed samples in a router: padding takes no part in counts and losses, and a sample is a sequence of its own.

The router's sums are of single tokens here (`TokenShard.single_tokens`). Padding is sent to all experts in turn with
weight zero, so that no expert has more of it than the others.

T tokens of this rank, N positions of a microbatch, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefold.config.run import MoeConfig
from moefold.kernels.routing.router_ops import TopkOutputs
from moefold.model.moe.sequence_choice import round_robin_experts
from moefold.model.token_layout import TokenShard


def leave_out_padding(chosen: TopkOutputs, moe: MoeConfig, share: TokenShard) -> TopkOutputs:
    """The outputs of the top-k choice, with sums of single tokens that are zero for padding."""
    weights_TK, ids_TK, counts_TE, shares_TE, squares_T = chosen
    is_padding_T = share.is_padding_T
    is_padding_T1 = is_padding_T[:, None]
    in_turn_TK = round_robin_experts(share.token_number_T, moe)
    return (
        weights_TK.masked_fill(is_padding_T1, 0),
        torch.where(is_padding_T1, in_turn_TK, ids_TK),
        counts_TE.masked_fill(is_padding_T1, 0),
        shares_TE.masked_fill(is_padding_T1, 0),
        squares_T.masked_fill(is_padding_T, 0),
    )


def counts_of_samples(counts_TE: Tensor, share: TokenShard, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """For each token, how often its sample chose each expert, on all ranks that hold parts of it: (T, E). Whole numbers
    are added, so that the order of the sum does not matter."""
    sample_T = share.sample_place_T
    positions = share.sequences * share.length
    zeros_NE = counts_TE.new_zeros(positions, counts_TE.shape[1])
    counts_NE = zeros_NE.index_add_(0, sample_T, counts_TE)
    counts_NE = sum_over_ranks(counts_NE)
    return counts_NE[sample_T]
