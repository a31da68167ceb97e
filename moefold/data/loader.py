"""Batches in an order that depends on the seed alone, each data-parallel rank taking its share of every batch.

The position is one number, the sequences the whole run has consumed. Any run, on any number of ranks, that starts from
that number goes on with the same sequences: exact resume, also in the middle of an epoch.

B sequences of S tokens; labels are the tokens one place on. Where tokens attend within documents, a batch also says
where the document of each begins, and the last token of a document has no label: what follows is not its business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from moefold.comm.host_copies import ToDevice, UploadStream
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    first: int = 0  # the number of its first sequence in the run's order; the others follow
    begins_BS: torch.Tensor | None = None  # the position at which a token's document begins; None: all see the sequence

    def microbatches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.tokens_BS), size):
            part = slice(start, start + size)
            begins_BS = self.begins_BS if self.begins_BS is None else self.begins_BS[part]
            yield Batch(self.tokens_BS[part], self.labels_BS[part], self.first + start, begins_BS)


class BatchLoader:
    """Non-overlapping windows of a long row of tokens, shuffled anew in every epoch. While a batch is worked on, the
    next is on its way to the device. `starts` are the places where documents begin, if tokens attend within them."""

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch: int,
        seed: int,
        dp: Axis,
        device: torch.device,
        starts: np.ndarray | None = None,
    ):
        self.tokens, self.seq_len, self.batch, self.seed, self.starts = tokens, seq_len, batch, seed, starts
        self.dp, self.uploads = dp, UploadStream(device)
        self.windows = (len(tokens) - 1) // seq_len
        self.consumed = 0
        self.ahead: tuple[int, ToDevice] | None = None  # what begins behind so many sequences

    def next(self) -> Batch:
        """The next global batch's share of this rank, and move on."""
        at, coming = self.ahead or (-1, None)
        if coming is None or at != self.consumed:  # the first, or somebody set `consumed`
            coming = self.begin(self.consumed, self.batch)
        batch = self.arrived(coming, self.first(self.consumed, self.batch))
        self.consumed += self.batch
        if self.uploads.stream is not None:
            self.ahead = (self.consumed, self.begin(self.consumed, self.batch))
        return batch

    def at(self, consumed: int, count: int) -> Batch:
        """This rank's share of the `count` sequences that follow the first `consumed`."""
        return self.arrived(self.begin(consumed, count), self.first(consumed, count))

    def arrived(self, coming: ToDevice, first: int) -> Batch:
        tokens, labels, *begins = coming.take()
        return Batch(tokens, labels, first, *begins)

    def share(self, count: int) -> int:
        """All shares are of one size, so that every rank takes part in as many passes; what is over counts for
        nothing."""
        return -(-count // self.dp.size)

    def first(self, consumed: int, count: int) -> int:
        return consumed + self.dp.index * self.share(count)

    def begin(self, consumed: int, count: int) -> ToDevice:
        """Tokens and labels, and where documents begin if that matters, on their way to the device."""
        rows = np.zeros((self.share(count), self.seq_len + 1), dtype=np.int64)
        first = self.first(consumed, count)
        for row, number in zip(rows, range(first, first + len(rows)), strict=True):
            start = self.window(number) * self.seq_len
            row[:] = self.tokens[start : start + self.seq_len + 1]
        labels = rows[:, 1:].copy()
        labels[max(0, consumed + count - first) :] = IGNORE_INDEX
        parts = [rows[:, :-1].copy(), labels]
        if self.starts is not None:
            begins = np.stack([self.document_begins(number) for number in range(first, first + len(rows))])
            labels[begins[:, 1:] == np.arange(1, self.seq_len + 1)] = IGNORE_INDEX  # of another document
            parts.append(begins[:, :-1].copy())
        return self.uploads.begin([torch.from_numpy(part) for part in parts])

    def document_begins(self, number: int) -> np.ndarray:
        """For each token of the number-th sequence, and the one behind it, where in the sequence its document begins:
        at zero if that was before."""
        assert self.starts is not None
        here = self.window(number) * self.seq_len + np.arange(self.seq_len + 1)
        start = self.starts[np.searchsorted(self.starts, here, side="right") - 1]
        return np.maximum(start - here[0], 0).astype(np.int32)

    def window(self, number: int) -> int:
        """Which window the number-th sequence of the run is."""
        epoch, place = divmod(number, self.windows)
        return int(epoch_permutation(self.seed, epoch, self.windows)[place])


@lru_cache(maxsize=4)
def epoch_permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)
