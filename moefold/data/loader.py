"""Batches in an order that depends on the seed alone, each data-parallel rank taking its share of every batch.

The position is one number, the sequences the whole run has consumed. Any run, on any number of ranks, that starts from
that number goes on with the same sequences: exact resume, also in the middle of an epoch.

B sequences of S tokens; labels are the tokens one place on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from moefold.kernels.cross_entropy import IGNORED
from moefold.layout.axes import Axis


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    first: int = 0  # the number of its first sequence in the run's order; the others follow

    def microbatches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.tokens_BS), size):
            part = slice(start, start + size)
            yield Batch(self.tokens_BS[part], self.labels_BS[part], self.first + start)


class Loader:
    """Non-overlapping windows of a long row of tokens, shuffled anew in every epoch."""

    def __init__(self, tokens: np.ndarray, seq_len: int, batch: int, seed: int, dp: Axis, device: torch.device):
        self.tokens, self.seq_len, self.batch, self.seed = tokens, seq_len, batch, seed
        self.dp, self.device = dp, device
        self.windows = (len(tokens) - 1) // seq_len
        self.consumed = 0

    def next(self) -> Batch:
        """The next global batch's share of this rank, and move on."""
        batch = self.at(self.consumed, self.batch)
        self.consumed += self.batch
        return batch

    def at(self, consumed: int, count: int) -> Batch:
        """This rank's share of the `count` sequences that follow the first `consumed`. All shares are of one size, so
        that every rank takes part in as many passes; what is over counts for nothing."""
        share = -(-count // self.dp.size)
        rows = np.zeros((share, self.seq_len + 1), dtype=np.int64)
        places = range(self.dp.index * share, (self.dp.index + 1) * share)
        for row, place in zip(rows, places, strict=True):
            start = self.window(consumed + place) * self.seq_len
            row[:] = self.tokens[start : start + self.seq_len + 1]
        both = torch.from_numpy(rows).to(self.device, non_blocking=True)
        tokens, labels = both[:, :-1].clone(), both[:, 1:].clone()  # two tensors: labels are changed below
        labels[max(0, count - places.start) :] = IGNORED
        return Batch(tokens, labels, consumed + places.start)

    def window(self, number: int) -> int:
        """Which window the number-th sequence of the run is."""
        epoch, place = divmod(number, self.windows)
        return int(epoch_order(self.seed, epoch, self.windows)[place])


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)
