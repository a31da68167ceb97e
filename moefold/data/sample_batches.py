"""Batches of a number of samples (`data.batch_of samples`), in as many bins as these fill. Torch-free.

    bins of a batch    8 bins, whose samples are those that fill them
    samples of a batch 8 samples: |longest sample||sample[sample]||[s][s][sample][sample]|  3 bins

A bin is a microbatch of at most `seq_len` tokens, so a step has as many microbatches as its samples need. Sample `n` of
a run is the next one of the source that gives window `n` where nothing is packed; samples of several sources may share
a bin. Nothing waits for a later batch: the states between batches are places in the rows. The bins of a batch have the
numbers of its first samples, so that no number stands for two bins of a run; a plan does not depend on ranks.
"""

from __future__ import annotations

from moefold.config.run import DataConfig
from moefold.data.packed_sequences import Bin, PackedSequences, PlacedSample, States, take_sample
from moefold.data.packing import PackingState, Sample, fill_bins


class SampleBatches(PackedSequences):
    """Bins of batches that have `batch` samples each."""

    def plan_batch(self, first: int, states: States) -> States:
        following = list(states)
        placed: list[PlacedSample] = []
        for number in range(first, first + self.batch):
            source, _ = self.mixture.place(number)
            row = self.sources[source].row
            sample, following[source] = self.next_sample(source, following[source])
            placed.append(PlacedSample(row, sample))
        lengths = [sample.length for _, sample in placed]
        bins: list[Bin] = []
        for numbers in fill_bins(lengths, self.seq_len, self.fit):
            bins.append([placed[number] for number in numbers])
        return self.keep_plan(first, bins, tuple(following))

    def next_sample(self, source: int, state: PackingState) -> tuple[Sample, PackingState]:
        """The next sample of a source, and the state behind it. Samples wait where a run has counted bins before."""
        if state.waiting:
            sample, *left = state.waiting
            return sample, PackingState(state.following, tuple(left))
        row = self.sources[source].row
        sample, following = take_sample(row, state.following, self.seq_len)
        return sample, PackingState(following)

    def bins_of_batch(self, first: int, count: int) -> int:
        return len(self.plan_at(first).bins)

    def epochs(self, number: int) -> dict[str, float]:
        """Of batches that are planned; how far later ones will have come depends on the lengths of their samples."""
        if number != self.begin and number not in self.states:
            return {}
        read: dict[str, float] = {}
        for source, state in zip(self.sources, self.states_at(number), strict=True):
            if source.name:
                read[source.name] = state.following / source.tokens
        return read


def packing_kind(data: DataConfig) -> type[PackedSequences]:
    """What packs the batches of a run."""
    return SampleBatches if data.batch_of == "samples" else PackedSequences
