"""Live microbatches of each stage of a rank at every moment, read off the pipeline program of the rank.

A forward adds a microbatch to its stage; the data gradient removes it and, where the weight gradient has a slot of its
own, leaves what that still needs. The moments are found once for each schedule and serve every model. Plain lists
suffice: importing numpy would take longer than any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import OP_KINDS, PipelineOp, RankSlots, Slot
from moefold.schedule.schedule_catalog import SCHEDULES, build_program


class StageBytes(NamedTuple):
    """Bytes of a microbatch by stage of a rank: kept, and waiting for weight gradients; `workspace` by running op, as
    `LiveMoment.running` numbers it."""

    kept: Sequence[float]
    waiting: Sequence[float]
    workspace: Sequence[float]


class LiveMoment(NamedTuple):
    """Live microbatches by stage, those whose weight gradients wait, and the running op: the number of its kind times
    the rank's stages plus its stage among them."""

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
    """One rank's distinct moments. `separate_wgrad`: weight gradients are computed in slots of their own."""

    moments: list[LiveMoment]
    separate_wgrad: bool

    def peak_moment(self, load: StageBytes) -> LiveMoment:
        """The first of the moments that hold most."""

        def total_bytes(moment: LiveMoment) -> float:
            kept, workspace = moment.bytes_held(load)
            return kept + workspace

        return max(self.moments, key=total_bytes)


AllMoments = list[RankMoments]  # by rank


def running_op(moment: LiveMoment) -> tuple[str, int]:
    """Kind of the op that runs at a moment, and its stage among those of the rank."""
    kind, chunk = divmod(moment.running, len(moment.live))
    return OP_KINDS[kind], chunk


def moments_by_rank(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> AllMoments:
    enough = enough_microbatches(schedule, pp, microbatches)
    return walk_schedule(schedule, pp, vpp, enough, pair, defer)


@lru_cache(maxsize=1024)
def walk_schedule(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> AllMoments:
    program = build_program(schedule, pp, vpp, microbatches)
    # The passes of a run, in its order: pairing, then deferred weight gradients.
    if pair:
        program = pair_forward_with_backward(program)
    if defer:
        program = defer_weight_grads(program)
    by_rank: AllMoments = []
    placement = SCHEDULES[schedule]
    for rank, slots in enumerate(program):
        stages = placement.stages_on_rank(rank, pp, vpp)
        by_rank.append(walk_rank_slots(slots, stages))
    return by_rank


def enough_microbatches(schedule: str, pp: int, microbatches: int) -> int:
    """As many microbatches as show every moment: a pipe is full after a few times pp, except for gpipe, which holds
    all. The remainder over groups of pp stays the same."""
    few = 4 * pp
    if schedule == "gpipe" or microbatches < few + pp:
        return microbatches
    return few + microbatches % pp


def walk_rank_slots(slots: RankSlots, stages: list[int]) -> RankMoments:
    live = [0] * len(stages)
    waiting = [0] * len(stages)
    moments: dict[LiveMoment, None] = {}  # distinct ones, in order
    for slot in slots:
        for op in slot:
            chunk = stages.index(op.stage)
            if op.kind == "F":
                live[chunk] += 1
            kind = OP_KINDS.index(op.kind)
            running = kind * len(stages) + chunk
            moment = LiveMoment(running, tuple(live), tuple(waiting))
            moments[moment] = None
            # The op has run: a data gradient ends a live microbatch, and may leave a weight gradient waiting.
            if op.kind == "D":
                live[chunk] -= 1
            waiting[chunk] += waiting_change(op, slot)
    separate_wgrad = any(map(is_lone_wgrad, slots))
    return RankMoments(list(moments), separate_wgrad)


def is_lone_wgrad(slot: Slot) -> bool:
    return len(slot) == 1 and slot[0].kind == "W"


def waiting_change(op: PipelineOp, slot: Slot) -> int:
    """How an op changes the number of waiting weight gradients: not at all where D and W share the slot."""
    _, stage, microbatch = op
    data_gradient = PipelineOp("D", stage, microbatch)
    weight_gradient = PipelineOp("W", stage, microbatch)
    if op == data_gradient and weight_gradient not in slot:
        return 1
    if op == weight_gradient and data_gradient not in slot:
        return -1
    return 0
