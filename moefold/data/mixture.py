"""A mixture: which source each sequence of a run comes from. At any point of the run each source has its share of the
sequences to within one. Torch-free.

Weights are whole numbers of slots in a period. The k-th sequence of a source with share w has its place between k / w
and (k + 1) / w; slots are given to the source whose place ends first. The pattern repeats after a period. A period of
more than 65,536 slots is walked in blocks of as many, as far as a run has come: one to two seconds for a million slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import lcm
from threading import Lock
from typing import NamedTuple

import numpy as np

from moefold.config.mixture_weights import WeightPhase
from moefold.data.recent import Recent

BLOCK = 65_536  # slots that are walked at once
KEPT_BLOCKS = 4  # more than a loader reads ahead

WHOLE = [WeightPhase(0, (Fraction(1),))]  # one source

Appointments = list[tuple[int, int]]  # slots and sources


class SourcePlace(NamedTuple):
    """The source of a sequence, and the number of the sequence in that source."""

    source: int
    number: int


class SlotBlock(NamedTuple):
    """The source of each slot of a block, and the slots of each source."""

    pattern: np.ndarray
    positions: list[np.ndarray]


class MixturePhase:
    """Sequences from number `first` on, until the next phase, which come after those of an earlier one."""

    def __init__(
        self,
        first: int,
        weights: Sequence[Fraction],
        earlier: MixturePhase | None,
    ):
        self.first = first
        self.earlier = earlier
        denominators = [weight.denominator for weight in weights]
        self.period = lcm(*denominators)
        self.slots = [int(weight * self.period) for weight in weights]
        nothing = [0] * len(weights)
        self.given = [nothing]  # slots of each source before each block that is known
        self.blocks = Recent(self.walk_block, KEPT_BLOCKS)
        self.walking = Lock()  # a checkpoint asks while a thread reads ahead

    @cached_property
    def before(self) -> list[int]:
        """The sequences that each source has given before the phase."""
        if self.earlier is None:
            return [0] * len(self.slots)
        return self.earlier.counts(self.first)

    def walk_block(self, block: int) -> SlotBlock:
        """A block of which the slots before it are known. Those before the next block are known from then on."""
        begin = block * BLOCK
        end = min(begin + BLOCK, self.period)
        slots = range(begin, end)
        sources = walk_slots(slots, self.slots, self.given[block])
        pattern = np.asarray(sources)
        positions: list[np.ndarray] = []
        for source, _ in enumerate(self.slots):
            of_source = np.flatnonzero(pattern == source)
            positions.append(of_source)
        if block + 1 == len(self.given):
            pairs = zip(self.given[block], positions, strict=True)
            following = [given + len(of_source) for given, of_source in pairs]
            self.given.append(following)
        return SlotBlock(pattern, positions)

    def block_at(self, block: int) -> SlotBlock:
        with self.walking:
            while len(self.given) <= block:
                latest = len(self.given) - 1
                self.blocks.get(latest)
            return self.blocks.get(block)

    def counts(self, number: int) -> list[int]:
        """The sequences that each source has given before sequence `number`."""
        sources = range(len(self.slots))
        return [self.count(source, number) for source in sources]

    def count(self, source: int, number: int) -> int:
        passed = number - self.first
        periods, slot = divmod(passed, self.period)
        block, within = divmod(slot, BLOCK)
        positions = self.block_at(block).positions[source]
        in_block = np.searchsorted(positions, within)
        in_period = self.given[block][source] + int(in_block)
        whole = periods * self.slots[source]
        return self.before[source] + whole + in_period

    def place(self, number: int) -> SourcePlace:
        passed = number - self.first
        slot = passed % self.period
        block, within = divmod(slot, BLOCK)
        pattern = self.block_at(block).pattern
        source = int(pattern[within])
        return SourcePlace(source, self.count(source, number))


def walk_slots(slots: range, shares: Sequence[int], before: Sequence[int]) -> list[int]:
    """The source of each of these slots of a period. `shares`: slots of each source in a period; `before`: those that
    each has been given."""
    period = sum(shares)
    given = list(before)
    waiting: Appointments = []  # by the slot from which a source may be given one
    ready: Appointments = []  # by the slot before which a source must be given one
    for source, share in enumerate(shares):
        if share:
            release = given[source] * period // share
            heappush(waiting, (release, source))
    pattern: list[int] = []
    for slot in slots:
        while waiting and waiting[0][0] <= slot:
            _, source = heappop(waiting)
            following = given[source] + 1
            deadline = -(-following * period // shares[source])
            heappush(ready, (deadline, source))
        _, source = heappop(ready)
        pattern.append(source)
        given[source] += 1
        release = given[source] * period // shares[source]
        heappush(waiting, (release, source))
    return pattern


class Mixture:
    """The sources of all sequences of a run. Weights change at steps, of `batch` sequences each."""

    def __init__(self, phases: Sequence[WeightPhase], batch: int):
        self.phases: list[MixturePhase] = []
        earlier = None
        for phase in phases:
            first = phase.step * batch
            earlier = MixturePhase(first, phase.weights, earlier)
            self.phases.append(earlier)

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
