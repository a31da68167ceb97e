"""Objectives: what a microbatch is scored by, as sums that become means over the global batch.

    NextTokens    cross-entropy of the next token, and of tokens further ahead
    Preferences   chosen responses against rejected ones, by what the model gained on a reference (DPO)

The first sum is the loss; further ones are losses too, or figures of weight 0. A model has one objective, chosen by
assembly.

N sums, M layers of multi-token prediction, B sequences of S positions, C tokens of a cp rank, P pairs of responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.comm.collectives import all_reduce
from moefold.config.run import ModelConfig
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.mtp import labels_shifted_by
from moefold.model.steps import Carry
from moefold.model.token_layout import TokenShard

ScoreLabels = Callable[..., Tensor]  # the head, with a stream and labels


class Objective(Protocol):
    """`sums`: how many, the loss first; `sums_in_evaluation`: those that a model has which is not trained."""

    sums: int
    sums_in_evaluation: int

    def losses(self, head: ScoreLabels, streams: list[Tensor], carry: Carry) -> Tensor:
        """(N,): the sums over this cp rank's tokens, the same on its tp ranks, of normed streams."""
        ...

    def counts(self, labels_BS: Tensor, shard: TokenShard) -> Tensor:
        """(N,): what the sums are divided by, this cp rank's summand."""
        ...

    def weights(self, counts_N: Tensor) -> Tensor:
        """(N,): factors of the sums in a gradient that is divided by the first count of the global batch."""
        ...

    def figures(self, means: Sequence[float]) -> dict[str, float]:
        """The means behind the first one, by their names in metrics.jsonl."""
        ...


class NextTokens:
    def __init__(self, model: ModelConfig):
        self.sums = 1 + model.mtp
        self.sums_in_evaluation = 1  # layers that look further ahead run in training alone
        self.weight_ahead = model.mtp_loss / max(1, model.mtp)

    def losses(self, head: ScoreLabels, streams: list[Tensor], carry: Carry) -> Tensor:
        """One for each normed stream: the model's own, and those of MTP layers."""
        shard = carry["token_shard"]
        labels_BS = carry["labels_BS"]
        losses = []
        for depth, h_TD in enumerate(streams):
            labels_C = labels_ahead(labels_BS, depth, shard)
            loss = head(h_TD, labels_C)
            losses.append(loss)
        return torch.stack(losses)

    def counts(self, labels_BS: Tensor, shard: TokenShard) -> Tensor:
        """Tokens with a label, at each depth."""
        counts = []
        for depth in range(self.sums):
            labels_C = labels_ahead(labels_BS, depth, shard)
            is_labelled = labels_C != IGNORE_INDEX
            counts.append(is_labelled.sum())
        return torch.stack(counts)

    def weights(self, counts_N: Tensor) -> Tensor:
        """One for the model's own. A loss of multi-token prediction is a mean over its own labels."""
        own, ahead_M = counts_N[:1], counts_N[1:]
        weights_M = self.weight_ahead * own / ahead_M.clamp(min=1)
        return torch.cat((torch.ones_like(own), weights_M))

    def figures(self, means: Sequence[float]) -> dict[str, float]:
        return {"mtp_loss": sum(means) / len(means)} if means else {}


def labels_ahead(labels_BS: Tensor, depth: int, shard: TokenShard) -> Tensor:
    """The labels `depth` tokens further ahead, of this cp rank's tokens: (C,)."""
    shifted_BS = labels_shifted_by(labels_BS, depth, shard.begins_BS)
    return shard.slice_for_cp_rank(shifted_BS)


class Preferences:
    """Direct preference optimisation: -log sigmoid(margin) of each pair. The reward of a response is beta times the
    log-probability that it gained on the reference model, the margin of a pair is the reward of the chosen response
    less that of the rejected one. Documents of a sequence are chosen and rejected in turn."""

    sums = 3  # loss, margin, whether the margin is above zero
    sums_in_evaluation = 3

    def __init__(self, beta: float):
        self.beta = beta

    def log_probabilities(self, head: ScoreLabels, streams: list[Tensor], carry: Carry) -> Tensor:
        """(C,): of each label; 0 where there is none."""
        labels_C = labels_ahead(carry["labels_BS"], 0, carry["token_shard"])
        return -head(streams[0], labels_C, by_token=True)

    def losses(self, head: ScoreLabels, streams: list[Tensor], carry: Carry) -> Tensor:
        """Every cp rank has its part of the same pairs, and of each pair's loss an equal share."""
        shard = carry["token_shard"]
        gain_C = self.log_probabilities(head, streams, carry) - carry["reference_C"]
        slots_BS = response_slots(shard)
        slot_C = shard.slice_for_cp_rank(slots_BS)
        gains = sum_by_slot(gain_C, slot_C, slots_BS)
        gains_P2 = all_reduce(gains, shard.cp).view(-1, 2)
        margin_P = self.beta * (gains_P2[:, 0] - gains_P2[:, 1])
        is_right_P = (margin_P > 0).to(margin_P.dtype)
        sums_NP = torch.stack((F.softplus(-margin_P), margin_P.detach(), is_right_P))
        is_pair_P = pairs_with_labels(carry["labels_BS"], shard)
        return (sums_NP * is_pair_P).sum(1) / shard.cp.size

    def counts(self, labels_BS: Tensor, shard: TokenShard) -> Tensor:
        """Pairs, an equal share of them on every cp rank."""
        pairs = pairs_with_labels(labels_BS, shard).sum() / shard.cp.size
        return pairs.expand(self.sums)

    def weights(self, counts_N: Tensor) -> Tensor:
        """One for the loss; figures have no gradient."""
        weights_N = torch.zeros_like(counts_N)
        weights_N[0] = 1
        return weights_N

    def figures(self, means: Sequence[float]) -> dict[str, float]:
        margin, accuracy = means
        return {"reward_margin": margin, "reward_accuracy": accuracy}


def response_slots(shard: TokenShard) -> Tensor:
    """(B, S): for each token the slot of its document. A sequence has an even number of slots, so that those of a pair
    are neighbours."""
    assert shard.begins_BS is not None, "preferences are packed documents"
    position_S = torch.arange(shard.length, device=shard.device)
    begins_here_BS = shard.begins_BS == position_S
    document_BS = begins_here_BS.cumsum(1) - 1
    slots = slots_of_sequence(shard)
    first_B1 = slots * torch.arange(shard.sequences, device=shard.device)[:, None]
    return first_B1 + document_BS


def slots_of_sequence(shard: TokenShard) -> int:
    return shard.length + shard.length % 2


def sum_by_slot(value_N: Tensor, slot_N: Tensor, slots_BS: Tensor) -> Tensor:
    """The sums of values with the same slot. On a GPU too the order of a sum is fixed."""
    sequences, length = slots_BS.shape
    zeros = value_N.new_zeros(sequences * (length + length % 2))
    return zeros.index_put((slot_N,), value_N, accumulate=True)


def pairs_with_labels(labels_BS: Tensor, shard: TokenShard) -> Tensor:
    """(P,): which pairs have tokens to train; the others are padding, or surplus of a batch."""
    slots_BS = response_slots(shard)
    is_labelled = (labels_BS != IGNORE_INDEX).flatten().double()
    counts = sum_by_slot(is_labelled, slots_BS.flatten(), slots_BS)
    return counts.view(-1, 2).amin(1) > 0
