"""The router's specification, and the tokens that it is applied to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of one call among `sequences` laid end to end: those from `first` on."""

    sequences: int
    length: int
    first: int = 0
