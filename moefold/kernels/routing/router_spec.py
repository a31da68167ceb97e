"""The router's specification, and the tokens it is applied to. T tokens of B sequences, N numbers of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

ScoreFunction = Callable[[Tensor], Tensor]  # logits_TE -> scores_TE, not negative


@dataclass(frozen=True)
class RouterSpec:
    """How a router selects experts; the configuration's keys of the same names are documented there."""

    k: int
    score: str = "softmax"
    normalize: str = "chosen"
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_score: str = "best_two"
    score_function: ScoreFunction | None = None  # of a score from another package, in place of `score`

    @property
    def normalized_over(self) -> str:
        """The experts over which weights are normalised."""
        return "chosen" if self.score == "softmax_chosen" else self.normalize


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of one call among `sequences` laid end to end: those from `first` on."""

    sequences: int
    length: int
    first: int = 0

    def sum(self, x_TN: Tensor) -> Tensor:
        """Over the tokens of each sequence: (B, N)."""
        behind = self.sequences * self.length - self.first - len(x_TN)
        padded = F.pad(x_TN, (0, 0, self.first, behind))
        by_sequence = padded.unflatten(0, (self.sequences, self.length))
        return by_sequence.sum(1)
