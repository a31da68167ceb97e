"""The plan of a batch that has a number of samples: the oldest ones, but for some that longer ones of a look-ahead
replace, so that bins are full. Torch-free.

    oldest     [sample][s][longer sample]          three of a batch
    ahead      [long sample][sam]                  taken from the stream, and not in the batch yet
    bins       |long sample[s]|longer sample[sam]  a sample waits for the next batch, where it is among the oldest

A sample that has waited long is not replaced, so that none is left behind. A plan depends on the samples before it
alone: a run that resumes from a saved state goes on with the same batches.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NamedTuple

from moefold.data.packing import LEAST_AHEAD, LONGEST_WAIT, PackingState, Sample, TakeSample, fill_bins

SAMPLES_AHEAD = 32  # of small batches
MOST_BATCHES_AHEAD = 2  # of smaller ones: samples must not wait long before they are among the oldest


class SourceSample(NamedTuple):
    """A sample, and the number of its source."""

    source: int
    sample: Sample

    @property
    def is_patient(self) -> bool:
        """Whether a sample may wait for the next batch."""
        return self.sample.batches < LONGEST_WAIT


class SamplePool(NamedTuple):
    """The samples of one source, the oldest first, of which a batch has `count`; and the place behind them."""

    samples: list[Sample]
    count: int
    following: int


SampleBin = list[SourceSample]
SpareSample = tuple[int, Sample]  # by length


def samples_ahead(count: int) -> int:
    """Samples to choose from beside those of a batch."""
    few = min(SAMPLES_AHEAD, MOST_BATCHES_AHEAD * count)
    return max(int(LEAST_AHEAD * count), few)


def take_pool(state: PackingState, take: TakeSample, count: int) -> SamplePool:
    """Samples that wait and the next ones of the stream, for a batch and its look-ahead."""
    samples = sorted(state.waiting)
    following = state.following
    wanted = count + samples_ahead(count)
    while len(samples) < wanted:
        sample, following = take(following)
        samples.append(sample)
    return SamplePool(samples, count, following)


def plan_samples(pools: list[SamplePool], capacity: int, fit: str) -> tuple[list[SampleBin], list[PackingState]]:
    """The bins of a batch, and the states of the sources behind it."""
    oldest: list[SourceSample] = []
    spare: list[list[SpareSample]] = []
    for source, pool in enumerate(pools):
        chosen = pool.samples[: pool.count]
        oldest += [SourceSample(source, sample) for sample in chosen]
        ahead = pool.samples[pool.count :]
        spare.append(sorted((sample.length, sample) for sample in ahead))
    lengths = [entry.sample.length for entry in oldest]
    bins: list[SampleBin] = []
    for numbers in fill_bins(lengths, capacity, fit):
        bins.append([oldest[number] for number in numbers])
    for samples in sorted(bins, key=tokens_of):
        replace_with_longer(samples, spare, capacity)
        samples.sort()
    states: list[PackingState] = []
    for pool, left in zip(pools, spare, strict=True):
        waiting = [sample._replace(batches=sample.batches + 1) for _, sample in left]
        states.append(PackingState(pool.following, tuple(sorted(waiting))))
    return bins, states


def tokens_of(samples: SampleBin) -> int:
    return sum(entry.sample.length for entry in samples)


def replace_with_longer(samples: SampleBin, spare: list[list[SpareSample]], capacity: int) -> None:
    """Replace samples of a bin by longer ones of their sources, those that fill most of its room, as long as any do."""
    room = capacity - tokens_of(samples)
    while True:
        gains = [longest_gain(entry, spare[entry.source], room) for entry in samples]
        gain = max(gains)
        if not gain:
            return
        place = gains.index(gain)
        source, sample = samples[place]
        of_source = spare[source]
        found = last_within(of_source, sample.length + gain)
        _, longer = of_source.pop(found)
        insort(of_source, (sample.length, sample))
        samples[place] = SourceSample(source, longer)
        room -= gain


def longest_gain(entry: SourceSample, spare: list[SpareSample], room: int) -> int:
    """Tokens that the best replacement of a sample adds; 0 where there is none."""
    if not entry.is_patient:
        return 0
    length = entry.sample.length
    found = last_within(spare, length + room)
    return max(0, spare[found][0] - length) if found >= 0 else 0


def last_within(spare: list[SpareSample], length: int) -> int:
    """The place of the last of the longest samples within a length; -1 where there is none."""
    return bisect_right(spare, length, key=length_of) - 1


def length_of(entry: SpareSample) -> int:
    return entry[0]
