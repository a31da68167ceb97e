"""Clocks a program: when each slot runs, how long ranks idle, how much they hold. The same `walk` an executor follows.

A slot of one forward or one backward takes its compute and then its communication. In a paired slot the two face each
other, and the slot takes as long as the busier of the two lanes, or as the longer op would take by itself:

    alone     compute  F F F           D D D W W W          paired    compute  F F F D D D W W W
              comm           f f f d d                                comm     d d   f f f
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.schedule.costs import Costs
from moefold.schedule.program import Op, Program, Slot, is_paired, last_stage_of, needs, rank_of, walk


@dataclass(frozen=True)
class Span:
    """A slot in time."""

    rank: int
    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Part:
    """An op's compute or its communication, inside its slot."""

    lane: str  # "compute" or "comm"
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A program on the clock. Lists are by rank; `live` counts the most microbatches between F and W, chunk by chunk;
    `exposed` is communication that no compute of the same rank hid."""

    spans: list[Span]
    makespan: float
    bubble: list[float]
    live: list[int]
    bytes: list[float]
    exposed: list[float]


def simulate(program: Program, costs: Costs) -> Timeline:
    last, home, ranks = last_stage_of(program), rank_of(program), len(program)
    end: dict[Op, float] = {}
    free, compute, busy = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    spans: list[Span] = []

    def arrives(need: Op, rank: int) -> float:
        return end[need] + (costs.send if home[need.stage] != rank else 0.0)

    def finish(rank: int, slot: Slot) -> None:
        inputs = [arrives(need, rank) for op in slot for need in needs(op, last) if need not in slot]
        start = max([free[rank], *inputs])
        free[rank] = start + duration(slot, costs)
        busy[rank] += free[rank] - start
        compute[rank] += sum(costs.seconds(op) for op in slot)
        end.update((op, free[rank]) for op in slot)
        spans.append(Span(rank, slot, start, free[rank]))

    walk(program, finish)
    makespan = max(free)
    return Timeline(
        spans,
        makespan,
        bubble=[1 - b / makespan if makespan else 0.0 for b in busy],
        live=[int(most_held(slots, lambda op: 1, lambda op: 1)) for slots in program],
        bytes=[
            most_held(slots, lambda op: costs.saved[op.stage], lambda op: costs.held[op.stage]) for slots in program
        ],
        exposed=[b - c for b, c in zip(busy, compute, strict=True)],
    )


def duration(slot: Slot, costs: Costs) -> float:
    alone = {op: costs.seconds(op) + costs.travel(op) for op in slot}
    if not is_paired(slot):
        return sum(alone.values())
    best = max(sum(map(costs.seconds, slot)), sum(map(costs.travel, slot)), *alone.values())
    return best + costs.friction * (sum(alone.values()) - best)


def most_held(slots: list[Slot], saved: Callable[[Op], float], until_w: Callable[[Op], float]) -> float:
    """The most a rank holds at once: F adds `saved`, D drops all of it but `until_w`, W drops that."""
    now = most = 0.0
    for slot in slots:
        for op in slot:
            now += {"F": saved(op), "D": until_w(op) - saved(op), "W": -until_w(op)}[op.kind]
            most = max(most, now)
    return most


def parts(span: Span, costs: Costs) -> list[Part]:
    """A slot's compute and communication as they might lie in it; those of a real run come from its trace."""
    found: list[Part] = []
    at = wire = span.start
    paired = is_paired(span.slot)
    for op in span.slot if paired else ():
        if op.kind == "D" and costs.travel(op):  # a backward begins with communication
            found.append(Part("comm", op, wire, wire + costs.travel(op)))
            wire += costs.travel(op)
    for op in span.slot:
        found.append(Part("compute", op, at, at + costs.seconds(op)))
        at += costs.seconds(op)
        if costs.travel(op) and not (paired and op.kind == "D"):
            begin = max(at, wire)
            wire = begin + costs.travel(op)
            found.append(Part("comm", op, begin, wire))
            at = at if paired else wire
    return found
