"""The batch loader: batches in an order that depends on the seed alone; each data-parallel rank takes its share.

The position is one number, the sequences that the run has consumed. Any run, on any number of ranks, that starts from
that number continues with the same sequences: exact resume, also in the middle of an epoch.

B sequences of S tokens; labels are the tokens shifted by one. Where tokens attend within documents, a batch also has
the position at which each token's document begins, and the last token of a document has label IGNORE_INDEX: it must not
predict the next document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moefold.comm.host_copies import ToDevice, UploadStream
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch."""

    tokens_BS: Tensor
    labels_BS: Tensor
    first: int = 0  # the number of its first sequence in the run's order; the others follow
    begins_BS: Tensor | None = None  # the position at which a token's document begins; None: one document
    imposed: Mapping[int, Tensor] = field(default_factory=dict)  # by MoE layer: expert ids (B, S, K) to use

    def microbatches(self, size: int) -> Iterator[Batch]:
        sequences = len(self.tokens_BS)
        for start in range(0, sequences, size):
            rows = slice(start, start + size)
            begins_BS = self.begins_BS
            if begins_BS is not None:
                begins_BS = begins_BS[rows]
            tokens_BS = self.tokens_BS[rows]
            labels_BS = self.labels_BS[rows]
            imposed: dict[int, Tensor] = {}
            for layer, ids_BSK in self.imposed.items():
                imposed[layer] = ids_BSK[rows]
            first = self.first + start
            yield Batch(tokens_BS, labels_BS, first, begins_BS, imposed)


class RoutingSource(Protocol):
    """Recorded expert ids of some MoE layers, by the number of a sequence in the run's order."""

    layers: list[int]

    def read_rows(self, layer: int, first: int, count: int) -> np.ndarray: ...


class BatchLoader:
    """Non-overlapping windows of a long array of tokens, shuffled anew in every epoch. While a batch is trained on, the
    next one is copied to the device. `starts`: where documents begin, if tokens attend within documents."""

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
        self.tokens = tokens
        self.seq_len = seq_len
        self.batch = batch
        self.seed = seed
        self.starts = starts
        self.dp = dp
        self.uploads = UploadStream(device)
        self.windows = (len(tokens) - 1) // seq_len
        self.consumed = 0
        self.replay: RoutingSource | None = None  # expert ids that batches carry
        self.prefetched: tuple[int, ToDevice] | None = None  # a batch being copied, by the sequences consumed before it

    def next_batch(self) -> Batch:
        """This rank's share of the next global batch. Advances the position."""
        position, upload = self.prefetched or (-1, None)
        if upload is None or position != self.consumed:  # the first batch, or `consumed` was set by a resume
            upload = self.begin_upload(self.consumed, self.batch)
        first = self.first_sequence(self.consumed, self.batch)
        batch = self.receive_batch(upload, first)
        self.consumed += self.batch
        if self.uploads.stream is not None:
            following = self.begin_upload(self.consumed, self.batch)
            self.prefetched = (self.consumed, following)
        return batch

    def batch_at(self, consumed: int, count: int) -> Batch:
        """This rank's share of the `count` sequences behind the first `consumed`."""
        upload = self.begin_upload(consumed, count)
        first = self.first_sequence(consumed, count)
        return self.receive_batch(upload, first)

    def receive_batch(self, upload: ToDevice, first: int) -> Batch:
        tokens, labels, *others = upload.take()
        begins = None if self.starts is None else others.pop(0)
        layers = self.replay.layers if self.replay else []
        imposed = dict(zip(layers, others, strict=True))
        return Batch(tokens, labels, first, begins, imposed)

    def sequences_per_rank(self, count: int) -> int:
        """Sequences in each rank's share of `count`, rounded up: every rank runs the same number of forward passes.
        The labels of surplus sequences are ignored."""
        return -(-count // self.dp.size)

    def first_sequence(self, consumed: int, count: int) -> int:
        share = self.sequences_per_rank(count)
        return consumed + self.dp.index * share

    def begin_upload(self, consumed: int, count: int) -> ToDevice:
        """Begin to copy tokens, labels and, if needed, document begins to the device."""
        first = self.first_sequence(consumed, count)
        end = first + self.sequences_per_rank(count)
        numbers = range(first, end)
        shape = (len(numbers), self.seq_len + 1)
        rows = np.zeros(shape, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.tokens_of_sequence(number)
        # Labels are the tokens shifted by one.
        tokens = rows[:, :-1].copy()
        labels = rows[:, 1:].copy()
        wanted = max(0, consumed + count - first)  # the rows behind are surplus
        labels[wanted:] = IGNORE_INDEX
        arrays = [tokens, labels]
        if self.starts is not None:
            windows = [self.document_begins(number) for number in numbers]
            begins = np.stack(windows)
            # A label that begins a document must not be predicted from the document before.
            next_positions = np.arange(1, self.seq_len + 1)
            begins_document = begins[:, 1:] == next_positions
            labels[begins_document] = IGNORE_INDEX
            token_begins = begins[:, :-1]
            arrays.append(token_begins.copy())
        arrays += self.replayed_choices(consumed, count)
        tensors = list(map(torch.from_numpy, arrays))
        return self.uploads.begin(tensors)

    def replayed_choices(self, consumed: int, count: int) -> list[np.ndarray]:
        """The recorded expert ids of this rank's sequences, one array for each of its MoE layers."""
        replay = self.replay
        if replay is None:
            return []
        first = self.first_sequence(consumed, count)
        share = self.sequences_per_rank(count)
        return [replay.read_rows(layer, first, share) for layer in replay.layers]

    def tokens_of_sequence(self, number: int) -> np.ndarray:
        """The tokens of a sequence, and the one behind it, which is a label only."""
        start = self.start_of_sequence(number)
        end = start + self.seq_len + 1
        return self.tokens[start:end]

    def document_begins(self, number: int) -> np.ndarray:
        """For each token of a sequence, and the one behind it: the position in the sequence at which its document
        begins, zero if that is before the sequence."""
        assert self.starts is not None
        start = self.start_of_sequence(number)
        positions = start + np.arange(self.seq_len + 1)
        next_document = np.searchsorted(self.starts, positions, side="right")
        begins = self.starts[next_document - 1] - start
        return np.maximum(begins, 0).astype(np.int32)

    def start_of_sequence(self, number: int) -> int:
        """Where the window that is the number-th sequence of the run begins."""
        epoch, index = divmod(number, self.windows)
        permutation = epoch_permutation(self.seed, epoch, self.windows)
        return int(permutation[index]) * self.seq_len


@lru_cache(maxsize=4)
def epoch_permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    bits = np.random.PCG64([seed, epoch])
    generator = np.random.Generator(bits)
    return generator.permutation(windows)
