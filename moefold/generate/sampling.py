"""Sampling: from logits to the next token. Filters are those of transformers, in the same order.

B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.errors import RunFailure, UserError

NO_TOKEN = -1


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. `temperature` 0 takes the most likely one. `top_k` keeps that many tokens (0: all), `top_p`
    the most likely ones that have so much probability together (1: all), `min_p` those with at least that share of the
    most likely one's probability (0: all). Sequence i of a batch draws with seed + i, as if alone."""

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1

    def __post_init__(self):
        limits = {
            "temperature": (0 <= self.temperature < math.inf, "a number of at least 0; 0 takes the most likely token"),
            "top_k": (self.top_k >= 0, "a whole number of at least 0; 0 keeps all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and at most 1; 1 keeps all tokens"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1; 0 keeps all tokens"),
            "seed": (0 <= self.seed < 1 << 63, "a whole number of at least 0"),
        }
        problems: list[str] = []
        for name, (is_legal, expected) in limits.items():
            if not is_legal:
                problems.append(f"{name} = {getattr(self, name)} is not legal; expected {expected}")
        if problems:
            raise UserError(*problems)


class Draws:
    """The tokens that sequences draw, `count` of each at most, on the device. Each sequence has random numbers of its
    own, and so has each draw, all made beforehand: the number of the draw is on the device too, so that drawing can be
    recorded and replayed."""

    def __init__(self, sampling: Sampling, sequences: int, count: int, device: torch.device | str = "cpu"):
        self.sampling = sampling
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        rows = [uniform_numbers(sampling.seed + i, count) for i in range(sequences)]
        self.uniform_BN = torch.stack(rows).to(device)

    def draw(self, logits_BV: Tensor) -> Tensor:
        """(B,): a token of each sequence; NO_TOKEN where logits are not a number."""
        choose = most_likely if self.sampling.temperature == 0 else self.choose_by_number
        tokens_B, is_damaged_B = choose(logits_BV)
        self.number += 1
        return tokens_B.masked_fill(is_damaged_B, NO_TOKEN)

    def choose_by_number(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and whether any logits are not a number."""
        scores_BV = filter_logits(logits_BV, self.sampling)
        uniform_B1 = self.uniform_BN.index_select(1, self.number)
        tokens_B = tokens_at(scores_BV, uniform_B1)
        is_damaged_B = logits_BV.isnan().any(-1)
        return tokens_B, is_damaged_B


def most_likely(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, the first of equals, and whether any logits are not a number, which is then the largest: one pass."""
    largest = logits_BV.max(-1)
    return largest.indices, largest.values.isnan()


def uniform_numbers(seed: int, count: int) -> Tensor:
    """Numbers from 0 to 1, without 1, of a sequence."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def tokens_at(scores_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """(B,): the first token up to which there is more than so much of all probability."""
    probs_BV = scores_BV.softmax(-1).double()
    up_to_each_BV = probs_BV.cumsum(-1)
    all_B1 = up_to_each_BV[:, -1:]
    is_before_BV = up_to_each_BV <= uniform_B1 * all_B1
    return is_before_BV.sum(-1)


def listed_tokens(tokens_B: Tensor) -> list[int]:
    """Tokens on the host, refused where logits were not a number."""
    tokens = tokens_B.tolist()
    if NO_TOKEN in tokens:
        raise RunFailure("logits are not a number: the weights are damaged; `moefold ckpt verify` checks a run's")
    return tokens


def filter_logits(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, in fp32 or better; -inf for tokens that are left out."""
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    scores_BV = logits_BV.to(wide) / sampling.temperature
    if sampling.top_k:
        scores_BV = keep_top_k(scores_BV, sampling.top_k)
    if sampling.top_p < 1:
        scores_BV = keep_top_p(scores_BV, sampling.top_p)
    if sampling.min_p:
        scores_BV = keep_min_p(scores_BV, sampling.min_p)
    return scores_BV


def keep_top_k(scores_BV: Tensor, count: int) -> Tensor:
    """The `count` largest, and all that equal the last of them."""
    vocab = scores_BV.shape[-1]
    largest = scores_BV.topk(min(count, vocab))
    least_B1 = largest.values[:, -1:]
    return scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)


def keep_top_p(scores_BV: Tensor, share: float) -> Tensor:
    """The fewest that together have the share of the probability; the largest is always kept."""
    ascending = scores_BV.sort()
    probs_BV = ascending.values.softmax(-1)
    up_to_each_BV = probs_BV.cumsum(-1)
    is_out_BV = up_to_each_BV <= 1 - share
    is_out_BV[:, -1].fill_(False)
    in_place_BV = is_out_BV.scatter(1, ascending.indices, is_out_BV)
    return scores_BV.masked_fill(in_place_BV, -torch.inf)


def keep_min_p(scores_BV: Tensor, share: float) -> Tensor:
    """Those with at least the share of the largest probability."""
    probs_BV = scores_BV.softmax(-1)
    largest_B1 = probs_BV.amax(-1, keepdim=True)
    return scores_BV.masked_fill(probs_BV < share * largest_B1, -torch.inf)
