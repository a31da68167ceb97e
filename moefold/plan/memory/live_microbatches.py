"""Live microbatches of each stage of a rank at every moment, from the pipeline program of the rank.

A forward adds a live microbatch to its stage; its data gradient removes it. Where the weight gradient has a slot of its
own, the bytes that it needs are held until then. Moments are computed once per schedule and used for every model. They
are plain lists, because importing numpy would take longer than a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from moefold.schedule.passes import PairKind, apply_passes
from moefold.schedule.program import OP_KINDS, PipelineOp, RankSlots, Slot
from moefold.schedule.schedule_catalog import SCHEDULES, build_program


class StageBytes(NamedTuple):
    """Bytes of a microbatch, by stage of a rank: `kept` until the data gradient, `waiting` for the weight gradient;
    `workspace` by running op, numbered as `LiveMoment.running`."""

    kept: Sequence[float]
    waiting: Sequence[float]
    workspace: Sequence[float]


class LiveMoment(NamedTuple):
    """Live microbatches by stage, microbatches with a deferred weight gradient by stage (`waiting`), and the running
    op: the number of its kind times the rank's stages plus its stage among them."""

    running: int
    live: tuple[int, ...]
    waiting: tuple[int, ...]

    def bytes_held(self, load: StageBytes) -> tuple[float, float]:
        """Bytes of live microbatches, and workspace of the running op."""
        kept = sum(map(mul, self.live, load.kept))
        waiting = sum(map(mul, self.waiting, load.waiting))
        return kept + waiting, load.workspace[self.running]


@dataclass(frozen=True)
class RankMoments:
    """Distinct moments of one rank. `separate_wgrad`: weight gradients are computed in slots of their own."""

    moments: list[LiveMoment]
    separate_wgrad: bool

    def peak_moment(self, load: StageBytes) -> LiveMoment:
        """The moment with the most bytes; of several, the first."""

        def total_bytes(moment: LiveMoment) -> float:
            kept, workspace = moment.bytes_held(load)
            return kept + workspace

        return max(self.moments, key=total_bytes)


AllMoments = list[RankMoments]  # by rank


def running_op(moment: LiveMoment) -> tuple[str, int]:
    """Kind of the running op at a moment, and its stage among those of the rank."""
    stages = len(moment.live)
    kind, chunk = divmod(moment.running, stages)
    return OP_KINDS[kind], chunk


def moments_by_rank(schedule: str, pp: int, vpp: int, microbatches: int, pairs: PairKind, defer: bool) -> AllMoments:
    period = 2 * pp if pairs == "alike" else pp
    enough = enough_microbatches(schedule, period, microbatches)
    return walk_schedule(schedule, pp, vpp, enough, pairs, defer)


@lru_cache(maxsize=1024)
def walk_schedule(schedule: str, pp: int, vpp: int, microbatches: int, pairs: PairKind, defer: bool) -> AllMoments:
    program = build_program(schedule, pp, vpp, microbatches)
    program = apply_passes(program, pairs, defer)
    by_rank: AllMoments = []
    placement = SCHEDULES[schedule]
    for rank, slots in enumerate(program):
        stages = placement.stages_on_rank(rank, pp, vpp)
        moments = walk_rank_slots(slots, stages)
        by_rank.append(moments)
    return by_rank


def enough_microbatches(schedule: str, period: int, microbatches: int) -> int:
    """Number of microbatches after which no new moment occurs: a few periods of the program, with the same remainder
    over periods. In gpipe all microbatches are live, so all are needed."""
    few = 4 * period
    if schedule == "gpipe" or microbatches < few + period:
        return microbatches
    return few + microbatches % period


def walk_rank_slots(slots: RankSlots, stages: list[int]) -> RankMoments:
    count = len(stages)
    live = [0] * count
    waiting = [0] * count
    moments: dict[LiveMoment, None] = {}  # distinct ones, in order
    for slot in slots:
        for op in slot:
            chunk = stages.index(op.stage)
            if op.kind == "F":
                live[chunk] += 1
            kind = OP_KINDS.index(op.kind)
            running = kind * count + chunk
            moment = LiveMoment(running, tuple(live), tuple(waiting))
            moments[moment] = None
            # After the op: a data gradient ends a live microbatch; its weight gradient may be deferred.
            if op.kind == "D":
                live[chunk] -= 1
            waiting[chunk] += waiting_change(op, slot)
    separate_wgrad = any(map(is_lone_wgrad, slots))
    return RankMoments(list(moments), separate_wgrad)


def is_lone_wgrad(slot: Slot) -> bool:
    return all(op.kind == "W" for op in slot)


def waiting_change(op: PipelineOp, slot: Slot) -> int:
    """Change of the number of deferred weight gradients by an op; 0 where D and W share the slot."""
    _, stage, microbatch = op
    data_gradient = PipelineOp("D", stage, microbatch)
    weight_gradient = PipelineOp("W", stage, microbatch)
    if op == data_gradient and weight_gradient not in slot:
        return 1
    if op == weight_gradient and data_gradient not in slot:
        return -1
    return 0
