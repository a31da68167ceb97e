"""The batch loader: batches in an order that depends on the seed alone; each data-parallel rank takes its share.

The position is one number, the sequences that the run has consumed. Any run, on any number of ranks, that starts from
that number continues with the same sequences: exact resume, also in the middle of an epoch.

B sequences of S tokens; labels are the tokens shifted by one. Where tokens attend within documents, a batch also has
the position at which each token's document begins, and the last token of a document has label IGNORE_INDEX: it must not
predict the next document. Packed sequences end in padding, whose labels are IGNORE_INDEX too, as are those that masks
say are not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moefold.comm.host_copies import ToDevice, UploadStream
from moefold.data.document_stream import DocumentId
from moefold.data.packed_sequences import PackedSequences
from moefold.data.regrouped_samples import RegroupedSamples
from moefold.data.sequences import Sequences
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX
from moefold.layout.past_keys import PastKeys

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch."""

    tokens_BS: Tensor
    labels_BS: Tensor
    first: int | Tensor = 0  # the number of its first sequence in the run's order; the others follow
    begins_BS: Tensor | None = None  # the position at which a token's document begins; None: one document
    imposed: Mapping[int, Tensor] = field(default_factory=dict)  # by MoE layer: expert ids (B, S, K) to use
    filled_B: Tensor | None = None  # the tokens of each packed sequence before its padding; None: nothing is packed
    waste: float | None = None  # the share of the global batch that is padding, likewise
    past: PastKeys | None = None  # of earlier positions, while text is generated
    reference_C: Tensor | None = None  # the label log-probabilities of a reference model, of this cp rank's tokens
    numbers_BS: Tensor | None = None  # of tokens in the run, if not those of whole sequences behind the first
    cp_size: int | None = None  # the ranks that share its sequences, if not those of the grid
    parts: tuple[Batch, ...] = ()  # its microbatches, where these have sizes of their own

    def microbatches(self, size: int) -> Iterator[Batch]:
        yield from self.parts
        if self.parts:
            return
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
            filled_B = self.filled_B
            if filled_B is not None:
                filled_B = filled_B[rows]
            first = self.first + start
            yield Batch(tokens_BS, labels_BS, first, begins_BS, imposed, filled_B)


class RoutingSource(Protocol):
    """Recorded expert ids of some MoE layers, by the number of a sequence in the run's order."""

    layers: list[int]

    def read_rows(self, layer: int, first: int, count: int) -> np.ndarray: ...


class BatchLoader:
    """Batches of sequences. While a batch is trained on, a thread assembles the next one, and on a device the one
    before it is copied there."""

    def __init__(
        self,
        sequences: Sequences,
        batch: int,
        dp: Axis,
        device: torch.device,
    ):
        self.sequences = sequences
        self.packed = sequences if isinstance(sequences, PackedSequences) else None
        self.batch = batch
        self.dp = dp
        self.uploads = UploadStream(device)
        self.consumed = 0
        self.replay: RoutingSource | None = None  # expert ids that batches carry
        self.prefetched: tuple[int, ToDevice] | None = None  # a batch being copied, by the sequences consumed before it
        self.assembled: tuple[int, Future[Arrays]] | None = None  # a batch being assembled, likewise
        self.thread = ThreadPoolExecutor(1, "moefold-data")
        self.reading = Lock()  # one reader of the sequences at a time

    def next_batch(self) -> Batch:
        """This rank's share of the next global batch. Advances the position."""
        position, upload = self.prefetched or (-1, None)
        if upload is None or position != self.consumed:  # the first batch, or `consumed` was set by a resume
            upload = self.begin_next_upload()
        first = self.first_sequence(self.consumed, self.batch)
        batch = self.receive_batch(upload, first)
        if self.packed is not None:
            batch = replace(batch, waste=self.waste_of_next())
        self.consumed += self.batch
        self.prefetched = None
        if self.uploads.stream is not None:
            following = self.begin_next_upload()
            self.prefetched = (self.consumed, following)
        return batch

    def waste_of_next(self) -> float:
        assert self.packed is not None, "windows have no padding"
        return self.packed.waste(self.consumed)

    def begin_next_upload(self) -> ToDevice:
        """Begin to copy the batch at the position, and to assemble the one behind it."""
        position, assembled = self.assembled or (-1, None)
        if assembled is None or position != self.consumed:
            arrays = self.assemble_batch(self.consumed, self.batch)
        else:
            arrays = assembled.result()
        following = self.consumed + self.batch
        assemble = self.assemble_batch
        future = self.thread.submit(assemble, following, self.batch)
        self.assembled = (following, future)
        return self.begin_upload(arrays)

    def batch_at(self, consumed: int, count: int) -> Batch:
        """This rank's share of the `count` sequences behind the first `consumed`."""
        arrays = self.assemble_batch(consumed, count)
        upload = self.begin_upload(arrays)
        first = self.first_sequence(consumed, count)
        return self.receive_batch(upload, first)

    def of_rank(self, distance: int) -> BatchLoader:
        """The loader of the dp rank that stands so many ranks on, for its share of a batch."""
        other = copy(self)
        other.dp = replace(self.dp, index=(self.dp.index + distance) % self.dp.size)
        return other

    def documents_of(self, numbers: range) -> list[list[DocumentId]]:
        """The documents of some sequences of the global batch, by sequence."""
        with self.reading:
            return [self.sequences.documents(number) for number in numbers]

    def begin_upload(self, arrays: Arrays) -> ToDevice:
        tensors = list(map(torch.from_numpy, arrays))
        return self.uploads.begin(tensors)

    def receive_batch(self, upload: ToDevice, first: int) -> Batch:
        tokens, labels, *others = upload.take()
        begins = None
        if self.sequences.has_documents:
            begins = others.pop(0)
        filled = None
        if self.packed is not None:
            filled = others.pop(0)
        layers = self.replay.layers if self.replay else []
        imposed = dict(zip(layers, others, strict=True))
        return Batch(tokens, labels, first, begins, imposed, filled)

    def sequences_per_rank(self, consumed: int, count: int) -> int:
        """Sequences in each rank's share of `count`, or of the bins that so many samples fill, rounded up: every rank
        runs the same number of forward passes. The labels of surplus sequences are ignored."""
        if self.packed is not None:
            count = self.packed.bins_of_batch(consumed, count)
        return -(-count // self.dp.size)

    def first_sequence(self, consumed: int, count: int) -> int:
        share = self.sequences_per_rank(consumed, count)
        return consumed + self.dp.index * share

    def assemble_batch(self, consumed: int, count: int) -> Arrays:
        """Tokens, labels and, if needed, document begins, filled tokens and replayed choices."""
        first = self.first_sequence(consumed, count)
        share = self.sequences_per_rank(consumed, count)
        numbers = range(first, first + share)
        with self.reading:
            sequences = [self.sequences.arrays(number) for number in numbers]
        tokens = np.stack([each.tokens for each in sequences])
        labels = np.stack([each.labels for each in sequences])
        wanted = max(0, consumed + count - first)  # the sequences behind are surplus
        labels[wanted:] = IGNORE_INDEX
        arrays = [tokens, labels]
        begins = [each.begins for each in sequences if each.begins is not None]
        if begins:
            arrays.append(np.stack(begins))
        filled = [each.filled for each in sequences if each.filled is not None]
        if filled:
            arrays.append(np.asarray(filled))
        return arrays + self.replayed_choices(consumed, count)

    def replayed_choices(self, consumed: int, count: int) -> list[np.ndarray]:
        """The recorded expert ids of this rank's sequences, one array for each of its MoE layers."""
        replay = self.replay
        if replay is None:
            return []
        first = self.first_sequence(consumed, count)
        share = self.sequences_per_rank(consumed, count)
        return [replay.read_rows(layer, first, share) for layer in replay.layers]


class RegroupedLoader(BatchLoader):
    """Batches of samples that share context-parallel groups of other sizes in every microbatch. The thread that
    assembles the next batch plans it too."""

    def __init__(self, regrouped: RegroupedSamples, batch: int, dp: Axis, device: torch.device):
        super().__init__(regrouped.packed, batch, dp, device)
        self.regrouped = regrouped

    def first_sequence(self, consumed: int, count: int) -> int:
        """That of all ranks: any of them may have samples of any sequence."""
        return consumed

    def assemble_batch(self, consumed: int, count: int) -> Arrays:
        """For each microbatch: tokens, labels, document begins, numbers of tokens, and filled tokens."""
        with self.reading:
            rows = self.regrouped.rows(consumed, count)
        arrays: Arrays = []
        for row, numbers in rows:
            assert row.begins is not None, "samples are documents"
            arrays += (row.tokens[None], row.labels[None], row.begins[None], numbers[None], np.asarray([row.filled]))
        return arrays

    def receive_batch(self, upload: ToDevice, first: int) -> Batch:
        tensors = upload.take()
        parts: list[Batch] = []
        for number, size in enumerate(self.regrouped.sizes(first)):
            tokens, labels, begins, numbers, filled = tensors[5 * number : 5 * number + 5]
            parts.append(Batch(tokens, labels, first, begins, filled_B=filled, numbers_BS=numbers, cp_size=size))
        tokens = torch.cat([part.tokens_BS for part in parts], dim=1)
        labels = torch.cat([part.labels_BS for part in parts], dim=1)
        return Batch(tokens, labels, first, parts=tuple(parts))

    def waste_of_next(self) -> float:
        return self.regrouped.waste(self.consumed)
