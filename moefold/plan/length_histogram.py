"""Lengths of documents as a histogram (`lengths`): what attention within documents computes, and how far the busiest
ranks of a packed batch are above the mean. Torch-free, without numpy: planning starts at once.

    700:0.9,65536:0.1    nine of ten documents have 700 tokens, one has 65,536

Documents longer than a sequence are cut, as packing cuts them. A token attends within its document, so that FLOPs are
means over the tokens of all documents. Bins have as many tokens as each other, but not as much attention: ranks that
share experts wait for the slowest of them in every microbatch, and all data-parallel ranks for each other in a step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from functools import lru_cache
from random import Random
from statistics import mean
from typing import NamedTuple

from moefold.config.entry_lists import parse_each_entry

MOST_DOCUMENTS = 40_000  # that are packed to learn what bins cost
FEWEST_BINS, MOST_BINS = 32, 1024
TRIED_STEPS = 8
MOST_MICROBATCHES = 64  # of a tried step: more of them differ less from the mean


class LengthShare(NamedTuple):
    """A length, and the share of documents that have it."""

    length: int
    share: float


Lengths = tuple[LengthShare, ...]


class BatchShape(NamedTuple):
    """Data-parallel ranks, those that share experts, microbatches of each, and bins of a microbatch."""

    ranks: int
    together: int
    microbatches: int
    bins: int = 1


def parse_lengths(entries: Iterable[str]) -> Lengths:
    """The histogram; entries that cannot be read are refused, all at once."""
    return tuple(parse_each_entry("lengths", entries, parse_length))


def parse_length(entry: str) -> LengthShare:
    length, colon, share = entry.partition(":")
    try:
        found = LengthShare(int(length), float(share))
    except ValueError:
        found = LengthShare(0, 0.0)
    if not colon or found.length < 1 or not 0 < found.share < float("inf"):
        raise ValueError("expected a length in tokens and a share of documents above 0, such as 700:0.9")
    return found


@lru_cache(maxsize=1024)
def cut_lengths(lengths: Lengths, seq_len: int) -> Lengths:
    """Lengths of the samples that documents are cut into, with their shares of samples."""
    shares: dict[int, float] = {}
    for length, share in lengths:
        whole, rest = divmod(length, seq_len)
        shares[seq_len] = shares.get(seq_len, 0.0) + share * whole
        shares[rest] = shares.get(rest, 0.0) + share
    counted = {length: share for length, share in shares.items() if length and share}
    total = sum(counted.values())
    return tuple(LengthShare(length, share / total) for length, share in sorted(counted.items()))


def mean_over_tokens(cost: Callable[[int], float], lengths: Lengths, seq_len: int) -> float:
    """The mean over all tokens of what a token costs in a document of its length; without lengths, in a sequence."""
    if not lengths:
        return cost(seq_len)
    samples = cut_lengths(lengths, seq_len)
    tokens = sum(length * share for length, share in samples)
    costs = sum(length * share * cost(length) for length, share in samples)
    return costs / tokens


@lru_cache(maxsize=64)
def bin_costs(lengths: Lengths, seq_len: int) -> tuple[float, ...]:
    """The attention of each of many bins, as the sum of squares of lengths, over the mean of all bins."""
    samples = cut_lengths(lengths, seq_len)
    average = sum(length * share for length, share in samples)
    affordable = int(MOST_DOCUMENTS * average / seq_len)
    bins = max(FEWEST_BINS, min(MOST_BINS, affordable))
    chance = Random(1)
    values = [length for length, _ in samples]
    shares = [share for _, share in samples]
    documents = max(1, round(bins * seq_len / average))
    drawn = chance.choices(values, shares, k=documents)
    costs = fill_by_best_fit(sorted(drawn, reverse=True), bins, seq_len)
    expected = mean(costs)
    return tuple(cost / expected for cost in costs)


def fill_by_best_fit(longest_first: list[int], bins: int, capacity: int) -> list[float]:
    """The sum of squares in each bin. Documents that fit in none are left out, as they would wait for another batch."""
    rooms = [(capacity, number) for number in range(bins)]
    costs = [0.0] * bins
    for length in longest_first:
        place = bisect_left(rooms, (length, 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
            insort(rooms, (room - length, number))
            costs[number] += float(length) ** 2
    return costs


@lru_cache(maxsize=4096)
def attention_imbalance(lengths: Lengths, seq_len: int, shape: BatchShape) -> float:
    """The time that attention takes of a step over the mean of its ranks."""
    if not lengths or shape.ranks == 1:
        return 1.0
    costs = bin_costs(lengths, seq_len)
    chance = Random(2)
    tried = [slowest_rank(costs, shape, chance) for _ in range(TRIED_STEPS)]
    return max(1.0, mean(tried))


def slowest_rank(costs: tuple[float, ...], shape: BatchShape, chance: Random) -> float:
    """Of a step with random bins: the attention of the ranks that share experts and are slowest, over the mean."""
    microbatches = min(shape.microbatches, MOST_MICROBATCHES)
    together = max(1, min(shape.together, shape.ranks))
    slowest = 0.0
    total = 0.0
    for _ in range(shape.ranks // together):
        waited = 0.0
        for _ in range(microbatches):
            drawn = [sum(chance.choices(costs, k=shape.bins)) for _ in range(together)]
            waited += max(drawn)
            total += sum(drawn)
        slowest = max(slowest, waited)
    average = total / (shape.ranks // together * together)
    return slowest / average
