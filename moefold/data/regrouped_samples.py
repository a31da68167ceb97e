"""Samples of packed batches, grouped anew for every microbatch: dynamic context parallelism. Torch-free.

A batch has the samples of its bins (`data/packed_sequences.py`), so that a run sees the same samples in a step whether
groups are dynamic or not, and saves the same state. Rows are as long as their samples, padded to what their ranks cut
evenly; a rank without samples has a row of padding. Tokens keep the numbers that they have in their bins, by which
jitter, dropout and stochastic rounding draw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moefold.config.run import Config
from moefold.data.dynamic_context import (
    ContextGroup,
    ContextPlan,
    ContextPrice,
    ContextShape,
    plan_context,
    tokens_of_rank,
)
from moefold.data.packed_sequences import KEPT_BATCHES, PackedSequences, PlacedSample, fill_row
from moefold.data.recent import keep_newest
from moefold.data.sequences import SequenceArrays
from moefold.layout.fold import powers_of_two_in


class RegroupedRow(NamedTuple):
    """A row of samples, and the number of each token among all tokens of the run; of padding, its place in the row."""

    arrays: SequenceArrays
    numbers: np.ndarray


class RegroupedBatch(NamedTuple):
    """The plan of a batch, its samples with the numbers of their first tokens, the group of this rank in each
    microbatch, and the share of padding in all rows."""

    plan: ContextPlan
    samples: list[PlacedSample]
    firsts: list[int]
    own: list[ContextGroup]
    waste: float


class RegroupedSamples:
    """`rank`: the place of this rank among the dp x cp ranks; `tp`: the ranks that cut a row once more."""

    def __init__(self, packed: PackedSequences, shape: ContextShape, price: ContextPrice, rank: int, tp: int):
        self.packed = packed
        self.shape = shape
        self.price = price
        self.rank = rank
        self.tp = tp
        self.planned: dict[int, RegroupedBatch] = {}

    def rows(self, first: int, count: int) -> list[RegroupedRow]:
        """The row of this rank's group in each microbatch, of the `count` sequences behind the first."""
        batch = self.plan_batch(first, count)
        keep_newest(self.planned, first, batch, KEPT_BATCHES)
        return [self.row_of(group, batch) for group in batch.own]

    def row_of(self, group: ContextGroup, batch: RegroupedBatch) -> RegroupedRow:
        own = [batch.samples[number] for number in group.samples]
        firsts = [batch.firsts[number] for number in group.samples]
        filled = sum(each.sample.length for each in own)
        length = padded_length(filled, group.size, self.tp)
        numbers = np.arange(length)
        begin = 0
        for each, first in zip(own, firsts, strict=True):
            count = each.sample.length
            end = begin + count
            numbers[begin:end] = range(first, first + count)
            begin = end
        return RegroupedRow(fill_row(own, length), numbers)

    def plan_batch(self, first: int, count: int) -> RegroupedBatch:
        samples: list[PlacedSample] = []
        firsts: list[int] = []
        for number in range(first, first + count):
            token = number * self.packed.seq_len
            for placed in self.packed.bin_of(number):
                samples.append(placed)
                firsts.append(token)
                token += placed.sample.length
        lengths = [each.sample.length for each in samples]
        plan = plan_context(lengths, self.shape, self.price)
        own: list[ContextGroup] = []
        padded = 0
        for microbatch in plan.microbatches:
            for group in microbatch.groups:
                held = sum(lengths[sample] for sample in group.samples)
                padded += padded_length(held, group.size, self.tp)
                if group.first <= self.rank < group.first + group.size:
                    own.append(group)
        return RegroupedBatch(plan, samples, firsts, own, 1 - sum(lengths) / padded)

    def sizes(self, first: int) -> list[int]:
        """The ranks that share a row with this one, in each microbatch of a batch that was assembled."""
        return [group.size for group in self.planned[first].own]

    def waste(self, first: int) -> float:
        return self.planned[first].waste


def padded_length(length: int, size: int, tp: int) -> int:
    """The length of a row that its ranks cut evenly: two chunks for each, if there are several, over tp."""
    multiple = row_multiple(size, tp)
    pieces = -(-length // multiple)
    return multiple * max(1, pieces)


def row_multiple(size: int, tp: int) -> int:
    chunks = 2 if size > 1 else 1
    return chunks * size * tp


def largest_group_length(config: Config, ranks: int) -> int:
    """The longest row that a group of the dp x cp ranks may have."""
    largest = powers_of_two_in(ranks)[-1]
    return padded_length(largest * tokens_of_rank(config), largest, config.parallel.tp)
