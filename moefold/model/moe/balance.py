"""Keeping experts evenly loaded, two ways, both independent of how a batch is split over ranks and microbatches.

The bias: after each step an expert that got less than its share becomes a little easier to choose, and the reverse.
The loss: within each sequence, expert load times mean score, which is least when both are even.

T tokens of B sequences of S, E experts, K choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from moefold.comm.collectives import sum_
from moefold.layout.axes import Axis
from moefold.model.share import Share


class Balance(NamedTuple):
    """How even a layer's load was: (most loaded / mean) - 1, and how many experts got nothing."""

    max_violation: float
    dead_experts: int


class Load(nn.Module):
    """Tokens each expert got since the last update, and the selection bias made from them."""

    bias_E: torch.Tensor
    counts_E: torch.Tensor

    def __init__(self, experts: int):
        super().__init__()
        self.register_buffer("bias_E", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def count(self, ids_TK: torch.Tensor) -> None:
        self.counts_E += count_choices(ids_TK.reshape(1, -1), len(self.counts_E))[0]

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor, rate: float) -> None:
        """Move the bias against the load by a fixed step, as its sign says, and start counting anew."""
        if rate:
            error_E = counts_E.sum() - counts_E * len(counts_E)  # E times (mean - count): whole numbers, so exact
            self.bias_E += rate * error_E.sign()
        self.counts_E.zero_()


def update_loads(loads: list[Load], rate: float, everyone: Axis) -> torch.Tensor:
    """Sum every layer's counts over all ranks in one message, update each bias, and return the counts_LE."""
    if not loads:
        return torch.zeros(0, 0, dtype=torch.int64)
    counts_LE = sum_(torch.stack([load.counts_E for load in loads]), everyone)
    for load, counts_E in zip(loads, counts_LE, strict=True):
        load.update(counts_E, rate)
    return counts_LE


def judge(counts_LE: torch.Tensor) -> list[Balance]:
    """The balance of each layer from its counts."""
    return [
        Balance(max(counts) * len(counts) / max(sum(counts), 1) - 1, counts.count(0)) for counts in counts_LE.tolist()
    ]


def count_choices(ids_BN: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert stands in each row: (B, E). Sums of whole numbers, so the same in any order."""
    zeros = torch.zeros(len(ids_BN), experts, dtype=torch.int64, device=ids_BN.device)
    return zeros.scatter_add_(1, ids_BN, torch.ones_like(ids_BN))


def sequence_balance_loss(scores_TE: torch.Tensor, ids_TK: torch.Tensor, share: Share, over: Axis) -> torch.Tensor:
    """Sum over tokens of E x sum_e (share of its sequence's choices that went to e) x (score of e).

    Divided by the number of tokens, as every loss is, perfect balance gives exactly one. The shares are of whole
    sequences, so the choices are counted `over` the ranks that hold their parts; given these, the loss is a plain sum
    over tokens, and each rank has its own summand.
    """
    experts, k = scores_TE.shape[1], ids_TK.shape[1]
    place_TK = share.sequence_T[:, None] * experts + ids_TK
    counts = count_choices(place_TK.reshape(1, -1), share.sequences * experts)
    share_BE = sum_(counts, over).view(-1, experts).to(scores_TE.dtype) / (share.length * k)
    return experts * (share_BE[share.sequence_T] * scores_TE).sum()
