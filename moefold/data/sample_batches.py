"""Batches of a number of samples (`data.batch_of samples`), in as many bins as these fill. Torch-free.

    bins of a batch    8 bins, whose samples are those that fill them
    samples of a batch 8 samples: |longest sample||sample[sample]||[s][s][sample][sample]|  3 bins

A bin is a microbatch of at most `seq_len` tokens, so a step has as many microbatches as its samples need. Sample `n` of
a run is of the source that gives window `n` where nothing is packed; samples of several sources may share a bin. A
look-ahead fills bins (`data/look_ahead.py`); what waits for a later batch is in the states between batches. The bins of
a batch have the numbers of its first samples, so that no number stands for two bins of a run; a plan does not depend on
ranks.
"""

from __future__ import annotations

from moefold.config.run import DataConfig
from moefold.data.look_ahead import SampleBin, SamplePool, plan_samples, take_pool
from moefold.data.packed_sequences import Bin, PackedSequences, PlacedSample, States
from moefold.data.packing import PackingState


class SampleBatches(PackedSequences):
    """Bins of batches that have `batch` samples each."""

    def plan_batch(self, first: int, states: States) -> States:
        before = self.mixture.counts(first)
        after = self.mixture.counts(first + self.batch)
        pools: list[SamplePool] = []
        for source, state in enumerate(states):
            count = after[source] - before[source]
            pools.append(self.pool_of(source, count, state))
        planned, following = plan_samples(pools, self.seq_len, self.fit)
        bins = [self.place(samples) for samples in planned]
        return self.keep_plan(first, bins, tuple(following))

    def pool_of(self, source: int, count: int, state: PackingState) -> SamplePool:
        """Samples to choose from; those that wait alone where a batch has none of a source."""
        take = self.taker_of(source)
        return take_pool(state, take, count)

    def place(self, samples: SampleBin) -> Bin:
        return [PlacedSample(self.sources[source].row, sample) for source, sample in samples]

    def bins_of_batch(self, first: int, count: int) -> int:
        return len(self.plan_at(first).bins)

    def epochs(self, number: int) -> dict[str, float]:
        """Of batches that are planned; how far later ones will have come depends on the lengths of their samples."""
        if number != self.begin and number not in self.states:
            return {}
        read: dict[str, float] = {}
        for source, state in zip(self.sources, self.states_at(number), strict=True):
            if source.name:
                waiting = sum(sample.length for sample in state.waiting)
                read[source.name] = (state.following - waiting) / source.tokens
        return read


def packing_kind(data: DataConfig) -> type[PackedSequences]:
    """What packs the batches of a run."""
    return SampleBatches if data.batch_of == "samples" else PackedSequences
