"""Static and dynamic context parallelism on the same samples: seconds of a step by the planner's prices and simulator.

    static   every sample on the ranks that the longest one needs, packed into bins of so many tokens
    even     likewise, with bins of about the same seconds in a microbatch
    dynamic  the plan of `data/dynamic_context.py`

Ranks wait for the slowest in every microbatch, as expert parallelism makes them; a pipeline's program is simulated with
the seconds of each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np

from moefold.data.dynamic_context import (
    ContextGroup,
    ContextMicrobatch,
    ContextPlan,
    ContextPrice,
    ContextShape,
    OpenGroup,
    SizedSample,
    group_seconds,
    plan_context,
    small_large_small,
)
from moefold.data.packing import fill_bins
from moefold.plan.time.dynamic_step import step_seconds


class LengthDistribution(NamedTuple):
    """Log-normal lengths, cut at the longest."""

    median: float
    sigma: float
    longest: int

    def draw(self, tokens: int, seed: int) -> list[int]:
        """Lengths of the samples of a batch of so many tokens."""
        random = np.random.Generator(np.random.PCG64(seed))
        lengths: list[int] = []
        total = 0
        while total < tokens:
            drawn = random.lognormal(log(self.median), self.sigma)
            length = max(1, min(int(drawn), self.longest))
            lengths.append(length)
            total += length
        return lengths


def static_plan(
    lengths: Sequence[int],
    shape: ContextShape,
    price: ContextPrice,
    longest: int,
    is_even: bool,
) -> ContextPlan:
    """Bins for groups of the size that the longest sample of the data needs, by best fit; in the order in which they
    were begun, or with the costliest in the same microbatches."""
    size = next(each for each in shape.sizes if longest <= each * shape.limit)
    bins = fill_groups(lengths, size, shape, price)
    if is_even:
        bins.sort(key=bin_seconds, reverse=True)
    together = shape.ranks // size
    microbatches: list[ContextMicrobatch] = []
    for begin in range(0, len(bins), together):
        some = bins[begin : begin + together]
        groups: list[ContextGroup] = []
        for place, filled in enumerate(some):
            closed = filled.close()
            groups.append(closed._replace(first=place * size))
        seconds = max(map(bin_seconds, some))
        microbatches.append(ContextMicrobatch(tuple(groups), seconds))
    if is_even:
        microbatches = small_large_small(microbatches)
    return ContextPlan(tuple(microbatches), step_seconds(microbatches, shape.stages))


def fill_groups(lengths: Sequence[int], size: int, shape: ContextShape, price: ContextPrice) -> list[OpenGroup]:
    """Bins of best fit, each a group of one size."""
    groups: list[OpenGroup] = []
    for numbers in fill_bins(list(lengths), size * shape.limit, "best_fit"):
        group = OpenGroup(0, size, price)
        longest_first = sorted(numbers, key=lambda number: -lengths[number])
        for number in longest_first:
            length = lengths[number]
            seconds = price.of_sample(length, size)
            alone = group_seconds(seconds, price.fixed)
            group.add(SizedSample(number, length, size, seconds, alone))
        groups.append(group)
    return groups


def bin_seconds(filled: OpenGroup) -> float:
    return filled.seconds


def dynamic_plan(lengths: Sequence[int], shape: ContextShape, price: ContextPrice) -> ContextPlan:
    plan = plan_context(lengths, shape, price)
    return plan._replace(seconds=step_seconds(plan.microbatches, shape.stages))
