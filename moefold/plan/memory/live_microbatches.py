"""How many microbatches each stage of a rank holds at every moment, read off the program that the rank will run.

A forward adds a microbatch to its stage; the data gradient takes it away and, where the weight gradient comes in a slot
of its own, leaves what that still needs. The moments are found once for each schedule and serve every model. Plain
lists do: importing numpy would take longer than any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import PipelineOp, Slot
from moefold.schedule.schedule_catalog import SCHEDULES, build_program

OP_KINDS = ("F", "D", "W")


class StageBytes(NamedTuple):
    """Bytes of a microbatch by stage of a rank: kept, waiting for weight gradients, and needed beside, the last by what
    runs, as `Moment.runs` numbers it."""

    kept: Sequence[float]
    waiting: Sequence[float]
    workspace: Sequence[float]


class LiveMoment(NamedTuple):
    """Live microbatches by stage, those whose weight gradients wait, and what runs, as the number of its kind times the
    rank's stages plus its stage among them."""

    runs: int
    live: tuple[int, ...]
    waiting: tuple[int, ...]

    def holds(self, load: StageBytes) -> tuple[float, float]:
        """What lives at this moment, and what is needed beside."""
        return sum(map(mul, self.live, load.kept)) + sum(map(mul, self.waiting, load.waiting)), load.workspace[
            self.runs
        ]


@dataclass(frozen=True)
class RankMoments:
    """One rank's distinct moments. `apart`: weight gradients are computed in slots of their own."""

    rows: list[LiveMoment]
    separate_wgrad: bool

    def peak(self, load: StageBytes) -> int:
        """The worst moment: the number of its row."""
        return max(range(len(self.rows)), key=lambda at: sum(self.rows[at].holds(load)))

    def holds(self, at: int, load: StageBytes) -> tuple[float, float]:
        return self.rows[at].holds(load)

    def says(self, at: int) -> tuple[str, int, tuple[int, ...]]:
        """Kind and stage of what runs at a moment, and live microbatches by stage."""
        kind, chunk = divmod(self.rows[at].runs, len(self.rows[at].live))
        return OP_KINDS[kind], chunk, self.rows[at].live


def moments_by_rank(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> list[RankMoments]:
    """Of every rank."""
    return walk_schedule(schedule, pp, vpp, enough_microbatches(schedule, pp, microbatches), pair, defer)


@lru_cache(maxsize=1024)
def walk_schedule(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> list[RankMoments]:
    program = build_program(schedule, pp, vpp, microbatches)
    program = pair_forward_with_backward(program) if pair else program
    program = defer_weight_grads(program) if defer else program
    return [
        walk_rank_slots(slots, SCHEDULES[schedule].stages_on_rank(rank, pp, vpp)) for rank, slots in enumerate(program)
    ]


def enough_microbatches(schedule: str, pp: int, microbatches: int) -> int:
    """As many microbatches as show all that happens: a pipe is full after a few times pp, but for gpipe, which holds
    all. What is left over when groups of pp are made stays the same."""
    few = 4 * pp
    return microbatches if schedule == "gpipe" or microbatches < few + pp else few + microbatches % pp


def walk_rank_slots(slots: list[Slot], stages: list[int]) -> RankMoments:
    count = {stage: at for at, stage in enumerate(stages)}
    live, waiting = [0] * len(stages), [0] * len(stages)
    found: dict[LiveMoment, None] = {}
    for slot in slots:
        for op in slot:
            at = count[op.stage]
            live[at] += op.kind == "F"
            found[LiveMoment(OP_KINDS.index(op.kind) * len(stages) + at, tuple(live), tuple(waiting))] = None
            live[at] -= op.kind == "D"
            if (
                PipelineOp("W" if op.kind == "D" else "D", op.stage, op.microbatch) not in slot
            ):  # else both at once: none waits
                waiting[at] += (op.kind == "D") - (op.kind == "W")
    return RankMoments(list(found), separate_wgrad=any([op.kind for op in slot] == ["W"] for slot in slots))
