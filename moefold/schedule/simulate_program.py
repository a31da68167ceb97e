"""Simulation of a pipeline program: start and end of each slot, idle time and held bytes of each rank.

A slot of one forward or one backward takes the time of its compute plus that of its communication. In a paired slot the
two lanes overlap. The slot takes the time of the busier lane, and at least that of the longer op alone:

    alone     compute  F F F           D D D W W W          paired    compute  F F F D D D W W W
              comm           f f f d d                                comm     d d   f f f
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moefold.schedule.program import (
    PipelineOp,
    Program,
    RankSlots,
    Slot,
    is_paired,
    last_stage_of,
    op_dependencies,
    walk_program,
)
from moefold.schedule.stage_costs import StageCosts

OpBytes = Callable[[PipelineOp], float]
OpLanes = tuple[float, float]  # seconds of compute and of communication


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


class OrderedSlot(NamedTuple):
    """A slot of a program: its rank, the number of its shape, and the slots of other ranks that it waits for."""

    rank: int
    slot: Slot
    shape: int
    awaited: tuple[int, ...]


class OrderedProgram:
    """A program's slots in an order that every rank could follow. Slots of the same shape, with the same kinds of op on
    the same stages, take the same time. Made once, a program may be timed with many costs."""

    def __init__(self, program: Program):
        self.ranks = len(program)
        self.slots: list[OrderedSlot] = []
        self.shapes: list[Slot] = []  # a slot of each
        self.shape_counts: list[Counter[int]] = [Counter() for _ in program]  # by rank
        self.last_stage = last_stage_of(program)
        self.places: dict[PipelineOp, int] = {}
        self.shape_numbers: dict[tuple[tuple[str, int], ...], int] = {}
        walk_program(program, self.append_slot)

    def append_slot(self, rank: int, slot: Slot) -> None:
        shape = tuple((op.kind, op.stage) for op in slot)
        number = self.shape_numbers.setdefault(shape, len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(slot)
        self.shape_counts[rank][number] += 1
        place = len(self.slots)
        awaited = self.awaited_slots(rank, slot)
        self.slots.append(OrderedSlot(rank, slot, number, awaited))
        for op in slot:
            self.places[op] = place

    def awaited_slots(self, rank: int, slot: Slot) -> tuple[int, ...]:
        """Slots of other ranks with inputs of this one; those of the same rank have ended anyway."""
        awaited: list[int] = []
        for op in slot:
            for need in op_dependencies(op, self.last_stage):
                if need in slot:
                    continue
                place = self.places[need]
                if self.slots[place].rank != rank:
                    awaited.append(place)
        return tuple(awaited)


@dataclass(frozen=True)
class SlotTimes:
    """A timed program: start and end of each slot in its order; by rank: when it ends, and seconds in slots and of
    compute in them."""

    starts: list[float]
    ends: list[float]
    finish: list[float]
    busy: list[float]
    compute: list[float]

    @property
    def makespan(self) -> float:
        return max(self.finish)

    @property
    def exposed(self) -> list[float]:
        """By rank: communication that no compute of the same rank overlapped."""
        lanes = zip(self.busy, self.compute, strict=True)
        return [busy - compute for busy, compute in lanes]


def time_slots(program: OrderedProgram, costs: StageCosts) -> SlotTimes:
    durations = [slot_duration(slot, costs) for slot in program.shapes]
    computes: list[float] = []
    for slot in program.shapes:
        seconds = map(costs.compute_seconds, slot)
        computes.append(sum(seconds))
    of_slots = [durations[slot.shape] for slot in program.slots]
    starts, ends, finish = follow_program(program, of_slots, costs.send)
    busy = [sum_over_shapes(counts, durations) for counts in program.shape_counts]
    compute = [sum_over_shapes(counts, computes) for counts in program.shape_counts]
    return SlotTimes(starts, ends, finish, busy, compute)


class FollowedProgram(NamedTuple):
    """Start and end of each slot, and when each rank ends."""

    starts: list[float]
    ends: list[float]
    finish: list[float]


def follow_program(program: OrderedProgram, durations: Sequence[float], send: float) -> FollowedProgram:
    """The slots of a program one behind the other, each as soon as its rank and its inputs are there."""
    finish = [0.0] * program.ranks
    starts: list[float] = []
    ends: list[float] = []
    for (rank, _, _, awaited), duration in zip(program.slots, durations, strict=True):
        start = finish[rank]
        for place in awaited:
            start = max(start, ends[place] + send)
        end = start + duration
        finish[rank] = end
        starts.append(start)
        ends.append(end)
    return FollowedProgram(starts, ends, finish)


def uneven_makespan(program: OrderedProgram, costs: StageCosts, weights: Sequence[float]) -> float:
    """Seconds of a program whose microbatches have uneven work: `weights` are by microbatch, 1 for that of the
    costs."""
    durations: list[float] = []
    for ordered in program.slots:
        weight = max(weights[op.microbatch] for op in ordered.slot)
        durations.append(weight * slot_duration(ordered.slot, costs))
    followed = follow_program(program, durations, costs.send)
    return max(followed.finish)


def slot_slack(program: OrderedProgram, times: SlotTimes, send: float) -> list[float]:
    """By slot: seconds by which the slot may end later without a later end of the program."""
    makespan = times.makespan
    latest = [makespan] * len(program.slots)  # ends
    next_start = [makespan] * program.ranks
    for place in reversed(range(len(program.slots))):
        slot = program.slots[place]
        next_on_rank = next_start[slot.rank]
        latest[place] = min(latest[place], next_on_rank)
        duration = times.ends[place] - times.starts[place]
        latest_start = latest[place] - duration
        next_start[slot.rank] = latest_start
        for earlier in slot.awaited:
            latest[earlier] = min(latest[earlier], latest_start - send)
    ends = zip(latest, times.ends, strict=True)
    return [limit - end for limit, end in ends]


def sum_over_shapes(counts: Counter[int], seconds: Sequence[float]) -> float:
    return sum(count * seconds[shape] for shape, count in counts.items())


def simulate_program(program: Program, costs: StageCosts) -> Timeline:
    def saved_bytes(op: PipelineOp) -> float:
        return costs.saved[op.stage]

    def held_bytes(op: PipelineOp) -> float:
        return costs.held[op.stage]

    ordered = OrderedProgram(program)
    times = time_slots(ordered, costs)
    makespan = times.makespan
    bubble = [idle_share(busy, makespan) for busy in times.busy]
    live = [int(most_held_at_once(slots, count_one, count_one)) for slots in program]
    size = [most_held_at_once(slots, saved_bytes, held_bytes) for slots in program]
    spans = slot_spans(ordered, times)
    return Timeline(spans, makespan, bubble, live, size, times.exposed)


def slot_spans(program: OrderedProgram, times: SlotTimes) -> list[SlotSpan]:
    spans: list[SlotSpan] = []
    timed = zip(program.slots, times.starts, times.ends, strict=True)
    for ordered, start, end in timed:
        span = SlotSpan(ordered.rank, ordered.slot, start, end)
        spans.append(span)
    return spans


def idle_share(busy: float, makespan: float) -> float:
    if not makespan:
        return 0.0
    return 1 - busy / makespan


def count_one(op: PipelineOp) -> float:
    return 1


def slot_duration(slot: Slot, costs: StageCosts) -> float:
    lanes: list[OpLanes] = []
    for op in slot:
        compute = costs.compute_seconds(op)
        comm = costs.comm_seconds(op)
        lanes.append((compute, comm))
    if is_paired(slot):
        return paired_duration(lanes, costs.friction)
    return sum(compute + comm for compute, comm in lanes)


def paired_duration(ops: Sequence[OpLanes], friction: float) -> float:
    """Seconds of ops that share a slot: those of the busier lane or the longest op, and `friction` of what is hidden
    behind them."""
    compute = comm = longest = 0.0
    for op_compute, op_comm in ops:
        compute += op_compute
        comm += op_comm
        longest = max(longest, op_compute + op_comm)
    best = max(compute, comm, longest)
    hidden = compute + comm - best
    return best + friction * hidden


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
            end = comm_end + duration
            intervals.append(LaneInterval("comm", op, comm_end, end))
            comm_end = end

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
