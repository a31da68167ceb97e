"""Plans of dynamic context parallelism: every sample once, within its ranks, on the fewest that fit, and even."""

from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.data.dynamic_context import (
    ContextPlan,
    ContextShape,
    SampleSeconds,
    group_seconds,
    plan_context,
    size_sample,
)


class SquarePrice(NamedTuple):
    """A token costs one, attention as much where a sample has `length` tokens; `sent`: of a token to each rank."""

    length: float = 100.0
    sent: float = 0.0
    fixed: float = 0.0

    def of_sample(self, length: int, size: int) -> SampleSeconds:
        return SampleSeconds(length / size, length**2 / self.length / size, self.sent * length * (size - 1) / size)


def long_tailed(samples: int, shape: ContextShape, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(0.25 * shape.limit), 1.4, samples)
    return np.clip(drawn, 1, shape.limit * shape.sizes[-1] // 4).astype(int).tolist()


def seconds_of(plan: ContextPlan, lengths: list[int], price: SquarePrice) -> list[float]:
    """The slowest group of each microbatch, by the price alone."""
    found = []
    for microbatch in plan.microbatches:
        slowest = 0.0
        for group in microbatch.groups:
            parts = [price.of_sample(lengths[number], group.size) for number in group.samples]
            sums = SampleSeconds(*(sum(column) for column in zip(*parts, strict=True))) if parts else None
            slowest = max(slowest, group_seconds(sums, price.fixed) if sums else 0.0)
        found.append(slowest)
    return found


@pytest.mark.parametrize("shape", [ContextShape(8, 64), ContextShape(12, 50), ContextShape(16, 256, 4)])
@pytest.mark.parametrize("sent", [0.0, 0.5])
def test_samples_are_placed_once_groups_tile_the_ranks_and_hold_what_fits(shape: ContextShape, sent: float):
    price = SquarePrice(shape.limit, sent, fixed=3.0)
    for seed in range(2):
        lengths = long_tailed(60, shape, seed)
        plan = plan_context(lengths, shape, price)
        placed = [number for each in plan.microbatches for group in each.groups for number in group.samples]
        assert sorted(placed) == list(range(len(lengths)))
        for microbatch in plan.microbatches:
            ranks = [range(group.first, group.first + group.size) for group in microbatch.groups]
            assert [rank for some in ranks for rank in some] == list(range(shape.ranks))
            for group in microbatch.groups:
                assert group.size in shape.sizes
                assert group.first % group.size == 0
                assert sum(lengths[number] for number in group.samples) <= group.size * shape.limit
        seconds = [microbatch.seconds for microbatch in plan.microbatches]
        assert seconds == pytest.approx(seconds_of(plan, lengths, price))
        assert plan.seconds == pytest.approx(sum(seconds) + (shape.stages - 1) * max(seconds))
        largest = seconds.index(max(seconds))
        assert seconds[: largest + 1] == sorted(seconds[: largest + 1])
        assert seconds[largest:] == sorted(seconds[largest:], reverse=True)
        assert plan == plan_context(lengths, shape, price), "every rank makes the same plan"


@pytest.mark.parametrize("quota", [inf, 90.0, 20.0, 0.0])
def test_a_sample_gets_the_fewest_ranks_that_hold_it_within_the_quota(quota: float):
    shape, price = ContextShape(16, 32), SquarePrice(sent=0.3)
    for length in range(1, 513, 7):
        seconds = {size: group_seconds(price.of_sample(length, size), 0.0) for size in (1, 2, 4, 8, 16)}
        holding = [size for size in seconds if length <= 32 * size]
        within = [size for size in holding if seconds[size] <= quota]
        expected = within[0] if within else min(holding, key=seconds.__getitem__)
        assert size_sample(0, length, shape, price, quota).size == expected


def least_seconds(lengths: list[int], shape: ContextShape, price: SquarePrice) -> float:
    """The optimum, by trying everything: every sample in every block of ranks of every microbatch."""
    blocks = [(first, size) for size in shape.sizes for first in range(0, shape.ranks, size)]
    best = inf
    for places in product(product(range(len(lengths)), blocks), repeat=len(lengths)):
        used = {place[0] for place in places}
        if used != set(range(len(used))):
            continue
        groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for length, place in zip(lengths, places, strict=True):
            groups.setdefault(place, []).append(length)
        taken = [(number, rank) for number, (first, size) in groups for rank in range(first, first + size)]
        fits = all(sum(some) <= shape.limit * size for (_, (_, size)), some in groups.items())
        if len(taken) > len(set(taken)) or not fits:
            continue
        slowest = [0.0] * len(used)
        for (number, (_, size)), some in groups.items():
            parts = [price.of_sample(length, size) for length in some]
            sums = SampleSeconds(*(sum(column) for column in zip(*parts, strict=True)))
            slowest[number] = max(slowest[number], group_seconds(sums, price.fixed))
        best = min(best, sum(slowest))
    return best


def test_tiny_plans_are_near_the_optimum_of_all_plans():
    ratios: list[float] = []
    price = SquarePrice(length=20.0, sent=0.2, fixed=1.0)
    for seed in range(12):
        shape = ContextShape(4 if seed % 4 == 0 else 2, 30)
        lengths = np.random.default_rng(seed).integers(1, 55, 3 if shape.ranks == 4 else 4).tolist()
        ratios.append(plan_context(lengths, shape, price).seconds / least_seconds(lengths, shape, price))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.2, ratios
    assert np.mean(ratios) <= 1.05, ratios


def test_ranks_wait_for_little_on_a_long_tailed_batch():
    shape, price = ContextShape(64, 8192), SquarePrice(32768.0)
    lengths = np.clip(np.random.default_rng(5).lognormal(np.log(2000), 1.4, 700), 1, 131072).astype(int).tolist()
    plan = plan_context(lengths, shape, price)
    work = sum(length + length**2 / price.length for length in lengths) / shape.ranks
    assert work / plan.seconds >= 0.9


def test_a_sample_that_no_group_holds_is_refused():
    with pytest.raises(UserError, match="sample 1 of the batch has 129 tokens; expected 1 to 128"):
        plan_context([5, 129], ContextShape(4, 32), SquarePrice())
