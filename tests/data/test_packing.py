"""Packing plans: every sample once, within capacity, with little waste, and the same after a resume."""

from collections.abc import Iterator

import numpy as np
import pytest

from moefold.data.packing import (
    LONGEST_WAIT,
    PackedBins,
    PackingShape,
    PackingState,
    Sample,
    TakenSample,
    find_room,
    pack_next,
)

CAPACITY = 4096


def lengths(mean: float = 700, sigma: float = 1.0, seed: int = 1) -> np.ndarray:
    """Log-normal lengths of that mean, cut at the capacity."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, 60_000)
    return np.clip(drawn, 1, CAPACITY).astype(int)


def plans(
    shape: PackingShape, batches: int, sizes: np.ndarray, state: PackingState | None = None
) -> Iterator[tuple[PackedBins, PackingState]]:
    """Plans of a stream whose places are the numbers of its samples."""
    state = state or PackingState()
    for _ in range(batches):
        plan, state = pack_next(state, lambda n: TakenSample(Sample(n, int(sizes[n])), n + 1), shape)
        yield plan, state


def wastes(shape: PackingShape, batches: int, sizes: np.ndarray) -> list[float]:
    return [1 - plan.used / (shape.bins * shape.capacity) for plan, _ in plans(shape, batches, sizes)]


@pytest.mark.parametrize("fit", ["first_fit", "best_fit"])
@pytest.mark.parametrize(("mean", "sigma"), [(700, 1.0), (2000, 1.4), (200, 0.5)])
def test_waste_is_at_most_two_percent_at_64_bins(fit: str, mean: float, sigma: float):
    found = wastes(PackingShape(64, CAPACITY, fit), 8, lengths(mean, sigma))
    assert max(found) <= 0.02, found


@pytest.mark.parametrize("bins", [1, 4, 16])
def test_waste_of_small_batches_is_at_most_two_percent(bins: int):
    found = wastes(PackingShape(bins, CAPACITY), 40, lengths())
    assert np.mean(found) <= 0.02, found


def test_every_sample_is_placed_once_none_waits_for_long_and_bins_hold_what_fits():
    sizes = lengths()
    shape = PackingShape(16, CAPACITY)
    seen: list[Sample] = []
    for plan, state in plans(shape, 60, sizes):
        for samples in plan.bins:
            assert samples == sorted(samples)
            assert sum(sample.length for sample in samples) <= CAPACITY
            seen += samples
        assert all(sample.batches <= LONGEST_WAIT + 1 for sample in state.waiting)
    every = sorted(sample.start for sample in [*seen, *state.waiting])
    assert every == list(range(state.following))
    assert all(sample.length == sizes[sample.start] for sample in seen)


def test_a_resumed_plan_goes_on_with_the_same_batches():
    sizes = lengths()
    shape = PackingShape(8, CAPACITY)
    whole = [plan.bins for plan, _ in plans(shape, 12, sizes)]
    *_, (_, state) = plans(shape, 5, sizes)
    rest = [plan.bins for plan, _ in plans(shape, 7, sizes, state)]
    assert rest == whole[5:]


def test_first_fit_takes_the_first_bin_with_room_and_best_fit_the_fullest():
    rooms = np.array([2, 9, 5, 6])
    assert find_room(rooms, 5, "first_fit") == 1
    assert find_room(rooms, 5, "best_fit") == 2
    assert find_room(rooms, 10, "best_fit") is None


def test_a_sample_longer_than_a_bin_is_refused_by_its_place():
    with pytest.raises(ValueError, match=f"sample 1 has {CAPACITY + 1} tokens"):
        list(plans(PackingShape(1, CAPACITY), 1, np.array([5, CAPACITY + 1])))
