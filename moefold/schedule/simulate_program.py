"""Simulation of a pipeline program: start and end of each slot, idle time and held bytes of each rank.

A slot of one forward or one backward takes the time of its compute plus that of its communication. In a paired slot the
two lanes overlap. The slot takes the time of the busier lane, and at least that of the longer op alone:

    alone     compute  F F F           D D D W W W          paired    compute  F F F D D D W W W
              comm           f f f d d                                comm     d d   f f f
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.schedule.program import (
    PipelineOp,
    Program,
    RankSlots,
    Slot,
    is_paired,
    last_stage_of,
    op_dependencies,
    rank_by_stage,
    walk_program,
)
from moefold.schedule.stage_costs import StageCosts

OpBytes = Callable[[PipelineOp], float]


@dataclass(frozen=True)
class SlotSpan:
    """A slot in time."""

    rank: int
    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class LaneInterval:
    """An op's compute or its communication, inside its slot."""

    lane: str  # "compute" or "comm"
    op: PipelineOp
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated program. Lists are by rank. `live`: largest number of microbatches between F and W, counted by chunk;
    `exposed`: communication that no compute of the same rank overlapped."""

    spans: list[SlotSpan]
    makespan: float
    bubble: list[float]
    live: list[int]
    bytes: list[float]
    exposed: list[float]


class ProgramClock:
    """Start and end of every slot, as `walk_program` visits them."""

    def __init__(self, program: Program, costs: StageCosts):
        self.costs = costs
        self.last_stage = last_stage_of(program)
        self.home = rank_by_stage(program)
        self.spans: list[SlotSpan] = []
        self.op_end: dict[PipelineOp, float] = {}
        # By rank: when it is free next, seconds in slots, seconds of compute in them.
        self.free = [0.0] * len(program)
        self.busy = [0.0] * len(program)
        self.compute = [0.0] * len(program)

    def finish_slot(self, rank: int, slot: Slot) -> None:
        inputs_ready = self.inputs_ready(rank, slot)
        start = max(self.free[rank], inputs_ready)
        end = start + slot_duration(slot, self.costs)
        self.free[rank] = end
        self.busy[rank] += end - start
        compute = map(self.costs.compute_seconds, slot)
        self.compute[rank] += sum(compute)
        self.spans.append(SlotSpan(rank, slot, start, end))
        for op in slot:
            self.op_end[op] = end

    def inputs_ready(self, rank: int, slot: Slot) -> float:
        """Time at which the last input of a slot has arrived on its rank."""
        latest = 0.0
        for op in slot:
            for need in op_dependencies(op, self.last_stage):
                if need not in slot:
                    latest = max(latest, self.arrival_time(need, rank))
        return latest

    def exposed_seconds(self, rank: int) -> float:
        return self.busy[rank] - self.compute[rank]

    def arrival_time(self, need: PipelineOp, rank: int) -> float:
        if self.home[need.stage] == rank:
            return self.op_end[need]
        return self.op_end[need] + self.costs.send


def simulate_program(program: Program, costs: StageCosts) -> Timeline:
    clock = ProgramClock(program, costs)
    walk_program(program, clock.finish_slot)
    makespan = max(clock.free)

    def saved_bytes(op: PipelineOp) -> float:
        return costs.saved[op.stage]

    def held_bytes(op: PipelineOp) -> float:
        return costs.held[op.stage]

    bubble = [idle_share(busy, makespan) for busy in clock.busy]
    live = [int(most_held_at_once(slots, count_one, count_one)) for slots in program]
    size = [most_held_at_once(slots, saved_bytes, held_bytes) for slots in program]
    exposed = [clock.exposed_seconds(rank) for rank in range(len(program))]
    return Timeline(clock.spans, makespan, bubble, live, size, exposed)


def idle_share(busy: float, makespan: float) -> float:
    if not makespan:
        return 0.0
    return 1 - busy / makespan


def count_one(op: PipelineOp) -> float:
    return 1


def slot_duration(slot: Slot, costs: StageCosts) -> float:
    compute = comm = alone = longest = 0.0
    for op in slot:
        op_compute = costs.compute_seconds(op)
        op_comm = costs.comm_seconds(op)
        op_alone = op_compute + op_comm
        compute += op_compute
        comm += op_comm
        alone += op_alone
        longest = max(longest, op_alone)
    if not is_paired(slot):
        return alone
    best = max(compute, comm, longest)
    hidden = alone - best
    return best + costs.friction * hidden


def most_held_at_once(slots: RankSlots, saved: OpBytes, until_wgrad: OpBytes) -> float:
    """Peak bytes of a rank: F adds `saved`, D frees all but `until_wgrad`, W frees that."""
    held = most = 0.0
    for slot in slots:
        for op in slot:
            if op.kind == "F":
                held += saved(op)
            elif op.kind == "D":
                held += until_wgrad(op) - saved(op)
            else:
                held -= until_wgrad(op)
            most = max(most, held)
    return most


def lane_intervals(span: SlotSpan, costs: StageCosts) -> list[LaneInterval]:
    """Compute and communication of a slot, placed for a drawing; the places in a real run are in its trace."""
    intervals: list[LaneInterval] = []
    paired = is_paired(span.slot)
    compute_end = comm_end = span.start

    # In a pair the backward begins with its communication, beside the forward's compute.
    for op in span.slot:
        duration = costs.comm_seconds(op)
        if paired and op.kind == "D" and duration:
            intervals.append(LaneInterval("comm", op, comm_end, comm_end + duration))
            comm_end += duration

    for op in span.slot:
        start = compute_end
        compute_end = start + costs.compute_seconds(op)
        intervals.append(LaneInterval("compute", op, start, compute_end))
        duration = costs.comm_seconds(op)
        already_sent = paired and op.kind == "D"
        if not duration or already_sent:
            continue
        start = max(compute_end, comm_end)
        comm_end = start + duration
        intervals.append(LaneInterval("comm", op, start, comm_end))
        if not paired:
            compute_end = comm_end
    return intervals
