"""Packed sequences of a run by their number: bins of whole samples, planned for one global batch at a time. Torch-free.

A sample is a document, or a part of `seq_len` tokens of a longer one; of a document with a mask the first part alone,
since an answer means nothing without its question. Each of its tokens but the last is an input, and
each but the first the label of the token before, so that every input has a label and a bin ends in padding alone.

Bin `n` of a run takes samples of one source: the source that gives window `n` where nothing is packed. Sources have
packing states of their own. The states before a batch depend on the batches before it alone, not on ranks; a checkpoint
has the states at its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from moefold.config.errors import UserError
from moefold.data.cut_samples import CutSamples, sum_cuts
from moefold.data.document_stream import DocumentId, Window
from moefold.data.mixture import Mixture
from moefold.data.packing import PackedBins, PackingShape, PackingState, Sample, TakenSample, TakeSample, pack_next
from moefold.data.recent import keep_newest
from moefold.data.sequences import SequenceArrays, Sequences, labels_of
from moefold.layout.labels import IGNORE_INDEX

KEPT_BATCHES = 8  # more than a loader assembles ahead of the one in use

States = tuple[PackingState, ...]  # by source


class DocumentRow(Protocol):
    """Documents in random order, epoch after epoch, as one row without end. `predicted`: the tokens of an epoch that
    have a token of their document before them. `has_mask`: whether the document of a token has a mask of trained
    tokens. `cut_samples`: of documents with a mask, what sequences of some length cut."""

    predicted: int

    def document_end(self, position: int) -> int: ...

    def has_mask(self, position: int) -> bool: ...

    def read(self, start: int, end: int) -> Window: ...

    def documents(self, start: int, end: int) -> list[DocumentId]: ...

    def cut_samples(self, seq_len: int) -> CutSamples: ...


class PackedSource(NamedTuple):
    """The row of a source, the digest of its tokens, and of a prepared one its name and the tokens of an epoch."""

    digest: str
    row: DocumentRow
    name: str = ""
    tokens: int = 0


class PlacedSample(NamedTuple):
    """A sample, and the row that has its tokens."""

    row: DocumentRow
    sample: Sample


Bin = list[PlacedSample]


class PlannedBatch(NamedTuple):
    """The bins of a batch, and the share of padding."""

    bins: list[Bin]
    waste: float


class PackedSequences:
    """Bins of samples in place of the windows of `unpacked`, which knows the tokens and the epochs of the data."""

    has_documents = True

    def __init__(
        self,
        unpacked: Sequences,
        sources: list[PackedSource],
        mixture: Mixture,
        batch: int,
        fit: str,
    ):
        refuse_empty_documents(sources)
        self.unpacked = unpacked
        self.sources = sources
        self.mixture = mixture
        self.batch = batch
        self.fit = fit
        self.tokens = unpacked.tokens
        self.windows = unpacked.windows
        self.seq_len = unpacked.seq_len
        unread = PackingState()
        self.begin = 0  # sequences before the first batch
        self.begin_states: States = (unread,) * len(sources)
        self.states: dict[int, States] = {}  # before the batch at these sequences
        self.planned: dict[int, PlannedBatch] = {}

    def arrays(self, number: int) -> SequenceArrays:
        return fill_row(self.bin_of(number), self.seq_len)

    def documents(self, number: int) -> list[DocumentId]:
        found: list[DocumentId] = []
        for row, sample in self.bin_of(number):
            found += row.documents(sample.start, sample.start + sample.length)
        return found

    def bin_of(self, number: int) -> Bin:
        """The samples of a sequence; none behind the last bin of its batch."""
        first = self.first_of_batch(number)
        bins = self.plan_at(first).bins
        place = number - first
        return bins[place] if place < len(bins) else []

    def bins_of_batch(self, first: int, count: int) -> int:
        """How many of the `count` numbers from `first` on are those of bins."""
        return count

    def first_of_batch(self, number: int) -> int:
        passed = number - self.begin
        return number - passed % self.batch

    def plan_at(self, first: int) -> PlannedBatch:
        """The plan of the batch behind the first `first` sequences."""
        if first not in self.planned:
            states = self.states_at(first)
            self.plan_batch(first, states)
        return self.planned[first]

    def states_at(self, first: int) -> States:
        """The packing states before a batch: known ones, or by planning all batches from the last known ones on. Those
        of the batch in use are known: a checkpoint reads them while a thread plans the next ones."""
        if first in self.states:
            return self.states[first]
        numbers = list(self.states)
        earlier = [known for known in numbers if known <= first]
        known = max(earlier, default=self.begin)
        states = self.states.get(known, self.begin_states)
        while known < first:
            states = self.plan_batch(known, states)
            known += self.batch
        return states

    def plan_batch(self, first: int, states: States) -> States:
        """Plan a batch. Returns the states behind it."""
        behind = first + self.batch
        before = self.mixture.counts(first)
        after = self.mixture.counts(behind)
        plans: list[PackedBins] = []
        following: list[PackingState] = []
        for source, state in enumerate(states):
            count = after[source] - before[source]
            plan, state = self.plan_source(source, count, state)
            plans.append(plan)
            following.append(state)
        bins: list[Bin] = []
        for number in range(first, behind):
            source, place = self.mixture.place(number)
            samples = plans[source].bins[place - before[source]]
            row = self.sources[source].row
            bins.append([PlacedSample(row, sample) for sample in samples])
        return self.keep_plan(first, bins, tuple(following))

    def keep_plan(self, first: int, bins: list[Bin], following: States) -> States:
        """Keep the plan of a batch and the states behind it, which are returned."""
        used = sum(sample.length for placed in bins for _, sample in placed)
        room = len(bins) * self.seq_len
        planned = PlannedBatch(bins, 1 - used / room)
        keep_newest(self.planned, first, planned, KEPT_BATCHES)
        keep_newest(self.states, first + self.batch, following, KEPT_BATCHES)
        return following

    def plan_source(self, source: int, bins: int, state: PackingState) -> tuple[PackedBins, PackingState]:
        if not bins:
            return PackedBins([], 0), state
        shape = PackingShape(bins, self.seq_len, self.fit)
        take = self.taker_of(source)
        return pack_next(state, take, shape)

    def taker_of(self, source: int) -> TakeSample:
        """What takes the next sample of a source."""
        row = self.sources[source].row

        def take(position: int) -> TakenSample:
            return take_sample(row, position, self.seq_len)

        return take

    def waste(self, first: int) -> float:
        return self.plan_at(first).waste

    def cut_samples(self) -> CutSamples:
        """What the length of sequences cuts of the samples of an epoch."""
        return sum_cuts(source.row.cut_samples(self.seq_len) for source in self.sources)

    def source_counts(self, number: int) -> dict[str, int]:
        return self.unpacked.source_counts(number)

    def epochs(self, number: int) -> dict[str, float]:
        """Padding counts as read."""
        return self.unpacked.epochs(number)

    def packing_state(self, number: int) -> list[dict[str, Any]]:
        """What a checkpoint has of the states before sequence `number`."""
        saved: list[dict[str, Any]] = []
        for source, state in zip(self.sources, self.states_at(number), strict=True):
            waiting = [list(sample) for sample in state.waiting]
            saved.append({"source": source.digest, "following": state.following, "waiting": waiting})
        return saved

    def restore(self, number: int, saved: list[Mapping[str, Any]]) -> None:
        """Go on at sequence `number` with the states of a checkpoint. A source that it does not have begins anew."""
        left = list(saved)
        states: list[PackingState] = []
        for source in self.sources:
            found = [entry for entry in left if entry["source"] == source.digest]
            state = PackingState()
            if found:
                left.remove(found[0])
                state = read_state(found[0], source.row, self.seq_len)
            states.append(state)
        self.begin = number
        self.begin_states = tuple(states)
        self.states = {}
        self.planned = {}


def refuse_empty_documents(sources: list[PackedSource]) -> None:
    for source in sources:
        if not source.row.predicted:
            raise UserError("the text has empty documents alone; expected some with tokens: add text")


def read_state(entry: Mapping[str, Any], row: DocumentRow, seq_len: int) -> PackingState:
    """The state of a source. Waiting samples that are longer than a bin is now are cut."""
    waiting: list[Sample] = []
    for start, length, batches in entry["waiting"]:
        end = start + length
        begins = range(start, end, seq_len)
        if row.has_mask(start):
            begins = begins[:1]
        for begin in begins:
            left = end - begin
            sample = Sample(begin, min(left, seq_len), batches)
            waiting.append(sample)
    return PackingState(entry["following"], tuple(waiting))


def take_sample(row: DocumentRow, position: int, longest: int) -> TakenSample:
    """The next sample at a position of a row or behind it. A document of one token, its end, has nothing to predict."""
    end = row.document_end(position)
    while end - position == 1:
        position = end
        end = row.document_end(position)
    inputs = end - 1 - position
    length = min(inputs, longest)
    behind = position + length
    sample = Sample(position, length)
    is_last = length == inputs or row.has_mask(position)
    return TakenSample(sample, end if is_last else behind)


def fill_row(placed: Bin, seq_len: int) -> SequenceArrays:
    """A bin: its samples one behind the other, then padding, which is a document without labels."""
    tokens = np.zeros(seq_len, dtype=np.int64)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    begins = np.zeros(seq_len, dtype=np.int32)
    filled = 0
    for row, sample in placed:
        behind = sample.start + sample.length
        window = row.read(sample.start, behind + 1)
        here = slice(filled, filled + sample.length)
        tokens[here] = window.ids[:-1]
        labels[here] = labels_of(window)
        begins[here] = filled + window.begins[:-1]
        filled += sample.length
    begins[filled:] = filled
    return SequenceArrays(tokens, labels, begins, filled)
