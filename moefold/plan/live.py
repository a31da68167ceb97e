"""How many microbatches each stage of a rank holds at every moment, read off the program that the rank will run.

A forward adds a microbatch to its stage; the data gradient takes it away and, where the weight gradient comes in a slot
of its own, leaves what that still needs. The moments are found once for each schedule and serve every model: what a
rank holds is then a product of two small matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.schedule.catalog import SCHEDULES, program_of
from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import Op, Slot

KINDS = ("F", "D", "W")


class Load(NamedTuple):
    """Bytes of a microbatch by stage of a rank: kept, waiting for weight gradients, and needed beside, the last by what
    runs, as `Moments.runs` numbers it."""

    kept: NDArray[np.float64]
    waiting: NDArray[np.float64]
    needed: NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """One rank's distinct moments, one a row: live microbatches by stage, those whose weight gradients wait, and what
    runs, as the number of its kind times the rank's stages plus its stage among them. `apart`: weight gradients are
    computed in slots of their own."""

    live: NDArray[np.float64]
    waiting: NDArray[np.float64]
    runs: NDArray[np.int64]
    apart: bool

    def peak(self, load: Load) -> int:
        """The worst moment: the number of its row."""
        return int(np.argmax(self.live @ load.kept + self.waiting @ load.waiting + load.needed[self.runs]))

    def holds(self, at: int, load: Load) -> tuple[float, float]:
        """What lives at a moment, and what is needed beside."""
        held = self.live[at] @ load.kept + self.waiting[at] @ load.waiting
        return float(held), float(load.needed[self.runs[at]])

    def says(self, at: int) -> tuple[str, int, tuple[int, ...]]:
        """Kind and stage of what runs at a moment, and live microbatches by stage."""
        kind, chunk = divmod(int(self.runs[at]), self.live.shape[1])
        return KINDS[kind], chunk, tuple(int(n) for n in self.live[at])


def moments_of(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> list[Moments]:
    """Of every rank."""
    return walked_program(schedule, pp, vpp, enough(schedule, pp, microbatches), pair, defer)


@lru_cache(maxsize=1024)
def walked_program(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> list[Moments]:
    program = program_of(schedule, pp, vpp, microbatches)
    program = pair_forward_with_backward(program) if pair else program
    program = defer_weight_grads(program) if defer else program
    return [walked(slots, SCHEDULES[schedule].stages_of(rank, pp, vpp)) for rank, slots in enumerate(program)]


def enough(schedule: str, pp: int, microbatches: int) -> int:
    """As many microbatches as show all that happens: a pipe is full after a few times pp, but for gpipe, which holds
    all. What is left over when groups of pp are made stays the same."""
    few = 4 * pp
    return microbatches if schedule == "gpipe" or microbatches < few + pp else few + microbatches % pp


def walked(slots: list[Slot], stages: list[int]) -> Moments:
    count = {stage: at for at, stage in enumerate(stages)}
    live, waiting = [0] * len(stages), [0] * len(stages)
    found: dict[tuple[int, ...], None] = {}
    for slot in slots:
        for op in slot:
            at = count[op.stage]
            live[at] += op.kind == "F"
            found[(KINDS.index(op.kind) * len(stages) + at, *live, *waiting)] = None
            live[at] -= op.kind == "D"
            if Op("W" if op.kind == "D" else "D", op.stage, op.microbatch) not in slot:  # else both at once: none waits
                waiting[at] += (op.kind == "D") - (op.kind == "W")
    table = np.array(list(found), dtype=np.float64)
    v = len(stages)
    apart = any([op.kind for op in slot] == ["W"] for slot in slots)
    return Moments(table[:, 1 : v + 1], table[:, v + 1 :], table[:, 0].astype(np.int64), apart)
