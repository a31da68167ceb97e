"""The vocabulary shard of a tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class VocabShard(NamedTuple):
    """The rows of the vocabulary that a rank's matrix holds: those from `first` on. `total` and `largest` all-reduce a
    tensor in place over the ranks of the other shards."""

    first: int
    total: Callable[[torch.Tensor], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]


def on_one_rank(x: torch.Tensor) -> torch.Tensor:
    return x


WHOLE_VOCABULARY = VocabShard(0, on_one_rank, on_one_rank)
