"""Packing plans: every sample once, within capacity, with little waste, and the same after a resume."""

import itertools

import numpy as np
import pytest

from moefold.data.packing import LONGEST_WAIT, PackingShape, PackingState, pack_next, padded_length

CAPACITY = 4096


def lengths(mean: float = 700, sigma: float = 1.0, seed: int = 1) -> np.ndarray:
    """Log-normal lengths of that mean, cut at the capacity."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, 60_000)
    return np.clip(drawn, 1, CAPACITY).astype(int)


def plans(shape: PackingShape, batches: int, sizes: np.ndarray, state: PackingState | None = None):
    state = state or PackingState()
    for _ in range(batches):
        batch, state = pack_next(state, lambda number: int(sizes[number]), shape)
        yield batch, state


@pytest.mark.parametrize("fit", ["first", "best"])
@pytest.mark.parametrize(("mean", "sigma"), [(700, 1.0), (2000, 1.4), (200, 0.5)])
def test_waste_is_at_most_two_percent_at_64_bins_without_a_look_ahead(fit, mean: float, sigma: float):
    shape = PackingShape(64, CAPACITY, look_ahead=0.0, fit=fit)
    wastes = [batch.waste for batch, _ in plans(shape, 8, lengths(mean, sigma))]
    assert max(wastes) <= 0.02, wastes


@pytest.mark.parametrize("bins", [1, 4, 16])
def test_waste_of_small_batches_is_at_most_two_percent_with_a_look_ahead(bins: int):
    shape = PackingShape(bins, CAPACITY, look_ahead=max(0.5, 8 / bins))
    wastes = [batch.waste for batch, _ in plans(shape, 40, lengths())]
    assert np.mean(wastes) <= 0.02, wastes


def test_every_sample_is_placed_once_none_waits_for_long_and_bins_hold_what_fits():
    sizes = lengths()
    shape = PackingShape(16, CAPACITY, multiple=8)
    seen: list[int] = []
    for batch, state in plans(shape, 60, sizes):
        for samples in batch.bins:
            assert samples == sorted(samples)
            assert sum(padded_length(int(sizes[number]), shape) for number in samples) <= CAPACITY
            seen += samples
        assert all(sample.batches <= LONGEST_WAIT + 1 for sample in state.waiting)
    waiting = [sample.number for sample in state.waiting]
    assert sorted(seen + waiting) == list(range(state.following))


def test_a_resumed_plan_goes_on_with_the_same_batches():
    sizes = lengths()
    shape = PackingShape(8, CAPACITY)
    whole = [batch.bins for batch, _ in plans(shape, 12, sizes)]
    *_, (_, state) = plans(shape, 5, sizes)
    rest = [batch.bins for batch, _ in plans(shape, 7, sizes, state)]
    assert rest == whole[5:]


def test_a_sample_longer_than_a_bin_is_refused_by_its_number():
    sizes = itertools.chain([5, CAPACITY + 1])
    with pytest.raises(ValueError, match=f"sample 1 has {CAPACITY + 1} tokens"):
        list(plans(PackingShape(1, CAPACITY), 1, np.array(list(sizes))))
