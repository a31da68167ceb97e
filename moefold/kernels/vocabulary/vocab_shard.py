"""Which words of a vocabulary a rank's matrix holds, and the label that is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

IGNORE_INDEX = -100  # a label that counts for nothing


class VocabShard(NamedTuple):
    """Which words a matrix holds, when the vocabulary is cut over ranks: those from `first` on. `total` and `largest`
    act on a tensor in place, over the ranks that hold the rest."""

    first: int
    total: Callable[[torch.Tensor], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]


WHOLE_VOCABULARY = VocabShard(0, lambda x: x, lambda x: x)
