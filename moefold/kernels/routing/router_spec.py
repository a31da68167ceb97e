"""How a router chooses, and which tokens it chooses for. T tokens of B sequences, N numbers of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class RouterSpec:
    """How a router chooses; the keys of the same names in the configuration say what each means."""

    k: int
    score: str = "softmax"
    normalize: str = "chosen"
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_score: str = "best_two"

    @property
    def normalized_over(self) -> str:
        """What the weights are normalised over."""
        return "chosen" if self.score == "softmax_chosen" else self.normalize


@dataclass(frozen=True)
class TokenSpan:
    """Which tokens these are of so many sequences laid end to end: those from `first` on."""

    sequences: int
    length: int
    first: int = 0

    def sum(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Over the tokens of each sequence: (B, N)."""
        missing = self.sequences * self.length - self.first - len(x_TN)
        return F.pad(x_TN, (0, 0, self.first, missing)).unflatten(0, (self.sequences, self.length)).sum(1)
