"""Batches of samples with a look-ahead: full bins, as many samples as asked for, none left behind."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from moefold.data.look_ahead import MOST_BATCHES_AHEAD, plan_samples, take_pool
from moefold.data.packing import LONGEST_WAIT, PackingState, Sample, TakenSample, TakeSample, fill_bins

BIN = 4096


def stream(mean: float, seed: int) -> TakeSample:
    """Log-normal lengths by their number in the stream."""
    chance = np.random.default_rng(seed)
    lengths: list[int] = []

    def take(position: int) -> TakenSample:
        while len(lengths) <= position:
            lengths.append(int(np.clip(chance.lognormal(np.log(mean) - 0.5, 1.0), 1, BIN)))
        return TakenSample(Sample(position, lengths[position]), position + 1)

    return take


@pytest.mark.parametrize(("mean", "batch"), [(200, 64), (200, 256), (700, 16), (700, 64), (2000, 16), (2000, 128)])
def test_at_most_two_percent_of_bins_are_padding(mean: float, batch: int):
    """In the mean of 30 batches that fill a few bins; the oldest samples alone would leave more."""
    take = stream(mean, batch)
    state = PackingState()
    used, room, alone = 0, 0, 0
    for _ in range(30):
        pool = take_pool(state, take, batch)
        oldest = [sample.length for sample in pool.samples[:batch]]
        alone += len(fill_bins(oldest, BIN, "best_fit")) * BIN - sum(oldest)
        bins, (state,) = plan_samples([pool], BIN, "best_fit")
        assert sum(map(len, bins)) == batch
        by_bin = [sum(sample.length for _, sample in samples) for samples in bins]
        assert max(by_bin) <= BIN
        used += sum(by_bin)
        room += len(bins) * BIN
    assert 1 - used / room <= 0.02
    assert room - used < alone


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_no_sample_is_lost_repeated_or_left_behind(batch: int):
    takes = [stream(700, 1), stream(300, 2)]
    states = [PackingState(), PackingState()]
    taken: list[list[int]] = [[], []]
    for step in range(40):
        counts = (batch, batch * (step % 2))  # the second source gives nothing in every second batch
        pools = [take_pool(state, take, size) for state, take, size in zip(states, takes, counts, strict=True)]
        bins, states = plan_samples(pools, BIN, "first_fit")
        for source, sample in (entry for samples in bins for entry in samples):
            taken[source].append(sample.start)
            waited = len(taken[source]) // batch - sample.start // batch
            assert waited <= LONGEST_WAIT + MOST_BATCHES_AHEAD + 1
    for numbers, state in zip(taken, states, strict=True):
        waiting = [sample.start for sample in state.waiting]
        assert sorted(numbers + waiting) == list(range(state.following))


def test_a_sample_that_has_waited_long_keeps_its_place():
    numbers = count()
    late, early = (Sample(next(numbers), 10, LONGEST_WAIT), Sample(next(numbers), 10))
    ahead = [Sample(next(numbers), 90), Sample(next(numbers), 80)]
    pool = take_pool(PackingState(4, (late, early, *ahead)), stream(1, 0), 2)
    bins, (state,) = plan_samples([pool], 100, "best_fit")
    assert [sample.start for _, sample in bins[0]] == [0, 2]
    assert {sample.start for sample in state.waiting} >= {1, 3}
