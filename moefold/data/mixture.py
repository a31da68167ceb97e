"""A mixture: which source each sequence of a run comes from. At any point of the run each source has its share of the
sequences to within one. Torch-free.

Weights are whole numbers of slots in a period. The k-th sequence of a source with share w has its place between k / w
and (k + 1) / w; slots are given to the source whose place ends first. Since the pattern repeats, the sequences that a
source has given are known at any point without counting from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import lcm
from typing import NamedTuple

import numpy as np

from moefold.config.mixture_weights import WeightPhase

LONGEST_PERIOD = 65_536

WHOLE = [WeightPhase(0, (Fraction(1),))]  # one source

Appointments = list[tuple[int, int]]  # slots and sources


class SourcePlace(NamedTuple):
    """The source of a sequence, and the number of the sequence in that source."""

    source: int
    number: int


def slots_of(weights: Sequence[Fraction]) -> list[int]:
    """Slots of each source in a period: exact where a period of at most 65,536 slots can be, else rounded."""
    denominators = [weight.denominator for weight in weights]
    period = lcm(*denominators)
    if period > LONGEST_PERIOD:
        return rounded_slots(weights)
    return [int(weight * period) for weight in weights]


def rounded_slots(weights: Sequence[Fraction]) -> list[int]:
    """Slots in the longest period, at least one for every weight above 0. What rounding leaves goes to the largest."""
    slots: list[int] = []
    for weight in weights:
        share = round(weight * LONGEST_PERIOD)
        if weight:
            share = max(share, 1)
        slots.append(share)
    most = max(slots)
    largest = slots.index(most)
    total = sum(slots)
    slots[largest] += LONGEST_PERIOD - total
    return slots


def period_pattern(slots: Sequence[int]) -> np.ndarray:
    """The source of each slot of a period."""
    period = sum(slots)
    given = [0] * len(slots)
    waiting: Appointments = []  # by the slot from which a source may be given one
    ready: Appointments = []  # by the slot before which a source must be given one
    for source, count in enumerate(slots):
        if count:
            heappush(waiting, (0, source))
    pattern: list[int] = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source = heappop(waiting)
            share = slots[source]
            following = given[source] + 1
            deadline = -(-following * period // share)
            heappush(ready, (deadline, source))
        _, source = heappop(ready)
        pattern.append(source)
        share = slots[source]
        given[source] += 1
        if given[source] < share:
            release = given[source] * period // share
            heappush(waiting, (release, source))
    return np.asarray(pattern)


class MixturePhase:
    """Sequences from number `first` on, until the next phase. `before`: those that each source has given by then."""

    def __init__(
        self,
        first: int,
        before: list[int],
        weights: Sequence[Fraction],
    ):
        self.first = first
        self.before = before
        self.slots = slots_of(weights)
        self.pattern = period_pattern(self.slots)
        self.positions: list[np.ndarray] = []
        for source, _ in enumerate(weights):
            is_given = self.pattern == source
            positions = np.flatnonzero(is_given)
            self.positions.append(positions)

    def counts(self, number: int) -> list[int]:
        """The sequences that each source has given before sequence `number`."""
        sources = range(len(self.slots))
        return [self.count(source, number) for source in sources]

    def count(self, source: int, number: int) -> int:
        passed = number - self.first
        periods, slot = divmod(passed, len(self.pattern))
        positions = self.positions[source]
        within = np.searchsorted(positions, slot)
        whole = periods * self.slots[source]
        before = self.before[source]
        return before + whole + int(within)

    def place(self, number: int) -> SourcePlace:
        passed = number - self.first
        slot = passed % len(self.pattern)
        source = int(self.pattern[slot])
        return SourcePlace(source, self.count(source, number))


class Mixture:
    """The sources of all sequences of a run. Weights change at steps, of `batch` sequences each."""

    def __init__(self, phases: Sequence[WeightPhase], batch: int):
        self.phases: list[MixturePhase] = []
        sources = len(phases[0].weights)
        before = [0] * sources
        for phase in phases:
            first = phase.step * batch
            if self.phases:
                before = self.phases[-1].counts(first)
            mixed = MixturePhase(first, before, phase.weights)
            self.phases.append(mixed)

    def phase_at(self, number: int) -> MixturePhase:
        latest = self.phases[0]
        for phase in self.phases:
            if phase.first <= number:
                latest = phase
        return latest

    def place(self, number: int) -> SourcePlace:
        phase = self.phase_at(number)
        return phase.place(number)

    def counts(self, number: int) -> list[int]:
        phase = self.phase_at(number)
        return phase.counts(number)
