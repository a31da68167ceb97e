"""The packing plan of a global batch: samples of many lengths in bins of equal capacity, with little waste. Torch-free.

    stream    [long sample][s][sample][sa][longer sample][s] ...
    waiting   samples that were taken from the stream and did not fit yet, the look-ahead among them
    bins      |long sample[s][sa]|longer sample[s]|

A plan is made of samples that wait and of the next ones of the stream, longest first. What does not fit waits for the
next batch; a sample that has waited long is placed before all others, so that none is left behind. A plan depends on
the state before it alone: a run that resumes from a saved state goes on with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

LONGEST_WAIT = 4  # batches


class PackingShape(NamedTuple):
    """Bins of a batch and tokens of a bin. Samples are padded to `multiple`, for context parallelism. `look_ahead`:
    tokens that may wait, as a share of those of a batch."""

    bins: int
    capacity: int
    multiple: int = 1
    look_ahead: float = 0.5
    fit: Literal["first", "best"] = "best"


class WaitingSample(NamedTuple):
    """A sample that was taken from the stream, and the batches that it did not fit in."""

    number: int
    batches: int


class PackingState(NamedTuple):
    """Between two batches: the next sample of the stream, and those that wait."""

    following: int = 0
    waiting: tuple[WaitingSample, ...] = ()


class PackedBatch(NamedTuple):
    """The samples of each bin, in the order of the stream; the share of all tokens that is padding."""

    bins: list[list[int]]
    waste: float


Lengths = Callable[[int], int]


def pack_next(state: PackingState, length_of: Lengths, shape: PackingShape) -> tuple[PackedBatch, PackingState]:
    """The plan of the next batch, and the state behind it."""
    pool, following = take_samples(state, length_of, shape)
    rooms = np.full(shape.bins, shape.capacity)
    bins: list[list[int]] = [[] for _ in range(shape.bins)]
    left: list[WaitingSample] = []
    used = 0
    for sample in placing_order(pool, length_of):
        length = length_of(sample.number)
        padded = padded_length(length, shape)
        place = find_room(rooms, padded, shape.fit)
        if place is None:
            waiting = WaitingSample(sample.number, sample.batches + 1)
            left.append(waiting)
            continue
        rooms[place] -= padded
        bins[place].append(sample.number)
        used += length
    for samples in bins:
        samples.sort()
    capacity = shape.bins * shape.capacity
    waste = 1 - used / capacity
    behind = PackingState(following, tuple(sorted(left)))
    return PackedBatch(bins, waste), behind


def take_samples(state: PackingState, length_of: Lengths, shape: PackingShape) -> tuple[list[WaitingSample], int]:
    """Those that wait and the next ones of the stream, until a batch and its look-ahead are full. Returns also the
    sample behind them."""
    capacity = shape.bins * shape.capacity
    wanted = capacity * (1 + shape.look_ahead)
    pool = list(state.waiting)
    following = state.following
    tokens = 0
    for sample in pool:
        length = length_of(sample.number)
        tokens += padded_length(length, shape)
    while tokens < wanted:
        length = length_of(following)
        padded = padded_length(length, shape)
        if padded > shape.capacity:
            raise ValueError(f"sample {following} has {length} tokens; expected at most {shape.capacity}: cut it")
        sample = WaitingSample(following, 0)
        pool.append(sample)
        tokens += padded
        following += 1
    return pool, following


def padded_length(length: int, shape: PackingShape) -> int:
    multiples = -(-length // shape.multiple)
    return multiples * shape.multiple


def placing_order(pool: list[WaitingSample], length_of: Lengths) -> list[WaitingSample]:
    """Samples that have waited long, in the order of the stream, then the others, longest first."""

    def rank(sample: WaitingSample) -> tuple[bool, int, int]:
        is_patient = sample.batches < LONGEST_WAIT
        length = length_of(sample.number)
        shortness = -length if is_patient else 0
        return is_patient, shortness, sample.number

    return sorted(pool, key=rank)


def find_room(rooms: np.ndarray, length: int, fit: str) -> int | None:
    """The first bin with room for a sample, or the fullest one; None where it fits in none."""
    fits = rooms >= length
    place = int(np.argmax(fits))
    if not fits[place]:
        return None
    if fit == "best":
        none = rooms.max() + 1
        candidates = np.where(fits, rooms, none)
        place = int(np.argmin(candidates))
    return place
