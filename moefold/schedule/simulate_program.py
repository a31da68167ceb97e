"""Clocks a program: when each slot runs, how long ranks idle, how much they hold. The same `walk` an executor follows.

A slot of one forward or one backward takes its compute and then its communication. In a paired slot the two face each
other, and the slot takes as long as the busier of the two lanes, or as the longer op would take by itself:

    alone     compute  F F F           D D D W W W          paired    compute  F F F D D D W W W
              comm           f f f d d                                comm     d d   f f f
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.schedule.program import (
    PipelineOp,
    Program,
    Slot,
    is_paired,
    last_stage_of,
    op_dependencies,
    rank_by_stage,
    walk_program,
)
from moefold.schedule.stage_costs import StageCosts


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
    """A program on the clock. Lists are by rank; `live` counts the most microbatches between F and W, chunk by chunk;
    `exposed` is communication that no compute of the same rank hid."""

    spans: list[SlotSpan]
    makespan: float
    bubble: list[float]
    live: list[int]
    bytes: list[float]
    exposed: list[float]


def simulate_program(program: Program, costs: StageCosts) -> Timeline:
    last, home, ranks = last_stage_of(program), rank_by_stage(program), len(program)
    end: dict[PipelineOp, float] = {}
    free, compute, busy = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    spans: list[SlotSpan] = []

    def arrival_time(need: PipelineOp, rank: int) -> float:
        return end[need] + (costs.send if home[need.stage] != rank else 0.0)

    def finish_slot(rank: int, slot: Slot) -> None:
        inputs = [arrival_time(need, rank) for op in slot for need in op_dependencies(op, last) if need not in slot]
        start = max([free[rank], *inputs])
        free[rank] = start + slot_duration(slot, costs)
        busy[rank] += free[rank] - start
        compute[rank] += sum(costs.seconds(op) for op in slot)
        end.update((op, free[rank]) for op in slot)
        spans.append(SlotSpan(rank, slot, start, free[rank]))

    walk_program(program, finish_slot)
    makespan = max(free)
    return Timeline(
        spans,
        makespan,
        bubble=[1 - b / makespan if makespan else 0.0 for b in busy],
        live=[int(most_held_at_once(slots, lambda op: 1, lambda op: 1)) for slots in program],
        bytes=[
            most_held_at_once(slots, lambda op: costs.saved[op.stage], lambda op: costs.held[op.stage])
            for slots in program
        ],
        exposed=[b - c for b, c in zip(busy, compute, strict=True)],
    )


def slot_duration(slot: Slot, costs: StageCosts) -> float:
    alone = {op: costs.seconds(op) + costs.travel(op) for op in slot}
    if not is_paired(slot):
        return sum(alone.values())
    best = max(sum(map(costs.seconds, slot)), sum(map(costs.travel, slot)), *alone.values())
    return best + costs.friction * (sum(alone.values()) - best)


def most_held_at_once(
    slots: list[Slot], saved: Callable[[PipelineOp], float], until_w: Callable[[PipelineOp], float]
) -> float:
    """The most a rank holds at once: F adds `saved`, D drops all of it but `until_w`, W drops that."""
    now = most = 0.0
    for slot in slots:
        for op in slot:
            now += {"F": saved(op), "D": until_w(op) - saved(op), "W": -until_w(op)}[op.kind]
            most = max(most, now)
    return most


def lane_intervals(span: SlotSpan, costs: StageCosts) -> list[LaneInterval]:
    """A slot's compute and communication as they might lie in it; those of a real run come from its trace."""
    found: list[LaneInterval] = []
    at = wire = span.start
    paired = is_paired(span.slot)
    for op in span.slot if paired else ():
        if op.kind == "D" and costs.travel(op):  # a backward begins with communication
            found.append(LaneInterval("comm", op, wire, wire + costs.travel(op)))
            wire += costs.travel(op)
    for op in span.slot:
        found.append(LaneInterval("compute", op, at, at + costs.seconds(op)))
        at += costs.seconds(op)
        if costs.travel(op) and not (paired and op.kind == "D"):
            begin = max(at, wire)
            wire = begin + costs.travel(op)
            found.append(LaneInterval("comm", op, begin, wire))
            at = at if paired else wire
    return found
