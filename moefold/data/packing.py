"""The packing plan of a batch: samples of many lengths in bins of equal capacity, with little waste. Torch-free.

    stream    [long sample][s][sample][sa][longer sample][s] ...
    waiting   samples that were taken from the stream and did not fit yet, the look-ahead among them
    bins      |long sample[s][sa]|longer sample[s]|

A plan is made of samples that wait and of the next ones of the stream, longest first. What does not fit waits for the
next batch; a sample that has waited long is placed before all others, so that none is left behind. A plan depends on
the state before it alone: a run that resumes from a saved state goes on with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LONGEST_WAIT = 4  # batches
LEAST_AHEAD = 0.5  # of a batch
BINS_AHEAD = 8


class PackingShape(NamedTuple):
    """Bins of a batch and tokens of a bin; `fit` is first_fit or best_fit."""

    bins: int
    capacity: int
    fit: str = "best_fit"

    @property
    def wanted(self) -> float:
        """Tokens to choose from: those of a batch and of the look-ahead, which has at least a few bins."""
        ahead = max(LEAST_AHEAD * self.bins, BINS_AHEAD)
        return (self.bins + ahead) * self.capacity


class Sample(NamedTuple):
    """A sample by its place in the stream; `batches`: those that it was taken for and did not fit in."""

    start: int
    length: int
    batches: int = 0


class TakenSample(NamedTuple):
    """The next sample of a stream, and the place behind it."""

    sample: Sample
    following: int


class PackingState(NamedTuple):
    """Between two batches: the place of the next sample in the stream, and the samples that wait."""

    following: int = 0
    waiting: tuple[Sample, ...] = ()


class PackedBins(NamedTuple):
    """The samples of each bin, in the order of the stream; the tokens of all of them."""

    bins: list[list[Sample]]
    used: int


TakeSample = Callable[[int], TakenSample]  # from a place in the stream on


def pack_next(state: PackingState, take: TakeSample, shape: PackingShape) -> tuple[PackedBins, PackingState]:
    """The plan of the next batch, and the state behind it."""
    pool, following = take_samples(state, take, shape)
    rooms = np.full(shape.bins, shape.capacity)
    bins: list[list[Sample]] = [[] for _ in range(shape.bins)]
    left: list[Sample] = []
    used = 0
    for sample in sorted(pool, key=placing_rank):
        place = find_room(rooms, sample.length, shape.fit)
        if place is None:
            waiting = sample._replace(batches=sample.batches + 1)
            left.append(waiting)
            continue
        rooms[place] -= sample.length
        bins[place].append(sample)
        used += sample.length
    for samples in bins:
        samples.sort()
    behind = PackingState(following, tuple(sorted(left)))
    return PackedBins(bins, used), behind


def take_samples(state: PackingState, take: TakeSample, shape: PackingShape) -> tuple[list[Sample], int]:
    """Those that wait and the next ones of the stream, until a batch and its look-ahead are full. Returns also the
    place behind them."""
    pool = list(state.waiting)
    following = state.following
    tokens = sum(sample.length for sample in pool)
    while tokens < shape.wanted:
        sample, following = take(following)
        if sample.length > shape.capacity:
            raise ValueError(
                f"sample {sample.start} has {sample.length} tokens; expected at most {shape.capacity}: cut it"
            )
        pool.append(sample)
        tokens += sample.length
    return pool, following


def placing_rank(sample: Sample) -> tuple[bool, int, int]:
    """Samples that have waited long first, in the order of the stream, then the others, longest first."""
    is_patient = sample.batches < LONGEST_WAIT
    shortness = -sample.length if is_patient else 0
    return is_patient, shortness, sample.start


def find_room(rooms: np.ndarray, length: int, fit: str) -> int | None:
    """The first bin with room for a sample, or the fullest one; None where it fits in none."""
    fits = rooms >= length
    place = int(np.argmax(fits))
    if not fits[place]:
        return None
    if fit == "best_fit":
        none = rooms.max() + 1
        candidates = np.where(fits, rooms, none)
        place = int(np.argmin(candidates))
    return place


def fill_bins(lengths: list[int], capacity: int, fit: str) -> list[list[int]]:
    """All samples by their numbers, longest first, in as many bins as they fill; the numbers of a bin are in order."""
    rooms = np.full(len(lengths), capacity)
    bins: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for number in longest_first:
        opened = rooms[: len(bins) + 1]  # the last one is empty
        place = find_room(opened, lengths[number], fit)
        if place is None:
            raise ValueError(f"a sample has {lengths[number]} tokens; expected at most {capacity}: cut it")
        if place == len(bins):
            bins.append([])
        rooms[place] -= lengths[number]
        bins[place].append(number)
    for numbers in bins:
        numbers.sort()
    return bins
