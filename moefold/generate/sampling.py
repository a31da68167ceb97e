"""Sampling: from logits to the next token. Filters are those of transformers, in the same order.

B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.errors import RunFailure, UserError


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
    """The tokens that sequences draw, each with random numbers of its own."""

    def __init__(self, sampling: Sampling, sequences: int):
        self.sampling = sampling
        self.generators: list[torch.Generator] = []
        for number in range(sequences):
            generator = torch.Generator()
            generator.manual_seed(sampling.seed + number)
            self.generators.append(generator)

    def draw(self, logits_BV: Tensor) -> list[int]:
        """A token of each sequence."""
        if logits_BV.isnan().any():
            raise RunFailure("logits are not a number: the weights are damaged; `moefold ckpt verify` checks a run's")
        if self.sampling.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        scores_BV = filter_logits(logits_BV, self.sampling)
        probs_BV = scores_BV.softmax(-1).cpu()
        tokens: list[int] = []
        for probs_V, generator in zip(probs_BV, self.generators, strict=True):
            drawn = torch.multinomial(probs_V, 1, generator=generator)
            tokens.append(int(drawn))
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
    is_out_BV[:, -1] = False
    in_place_BV = is_out_BV.scatter(1, ascending.indices, is_out_BV)
    return scores_BV.masked_fill(in_place_BV, -torch.inf)


def keep_min_p(scores_BV: Tensor, share: float) -> Tensor:
    """Those with at least the share of the largest probability."""
    probs_BV = scores_BV.softmax(-1)
    largest_B1 = probs_BV.amax(-1, keepdim=True)
    return scores_BV.masked_fill(probs_BV < share * largest_B1, -torch.inf)
