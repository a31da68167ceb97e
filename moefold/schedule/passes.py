"""Passes over a pipeline program: each returns a program that does the same work in another order.

    defer_weight_grads            D+W                ->   D  ...  W          weight gradients fill later gaps
    pair_forward_with_backward    F   D+W            ->   F+D+W              communication overlaps with compute
    pair_alike                    F   F   D+W   D+W  ->   F+F   D+D+W+W      the same, by two microbatches in step

`apply_passes` has the order of those that a run wants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from moefold.schedule.program import (
    PipelineOp,
    Program,
    RankSlots,
    Slot,
    last_stage_of,
    op_dependencies,
    ops_with_ranks,
    walk_program,
)

RankBackward = RankSlots  # a slot with D, then the slots of lone W that followed it
SlotCondition = Callable[[Slot], bool]
PairKind = Literal["none", "opposite", "alike"]


def apply_passes(program: Program, pairs: PairKind, defer: bool) -> Program:
    """The program of a run. A rank that pairs a forward with a backward defers weight gradients of pairs; of two
    microbatches in step both defer what one would."""
    if pairs == "opposite":
        program = pair_forward_with_backward(program)
    if defer:
        program = defer_weight_grads(program)
    if pairs == "alike":
        program = pair_alike(program)
    return program


def defer_weight_grads(program: Program) -> Program:
    """The program with deferred weight gradients: rank r defers r of them, so that data gradients run first and no rank
    holds more than rank 0 did."""
    deferred: Program = []
    for rank, slots in enumerate(program):
        deferred.append(defer_rank_wgrads(slots, limit=rank))
    return deferred


def defer_rank_wgrads(slots: RankSlots, limit: int) -> RankSlots:
    """The slots of a rank with at most `limit` weight gradients deferred at a time."""
    deferred: deque[PipelineOp] = deque()
    reordered: list[Slot] = []
    for slot in slots:
        weight_grads = [op for op in slot if op.kind == "W"]
        other_ops = tuple(op for op in slot if op.kind != "W")
        if other_ops:
            reordered.append(other_ops)
        deferred.extend(weight_grads)
        while len(deferred) > limit:
            oldest = deferred.popleft()
            reordered.append((oldest,))
    reordered += [(op,) for op in deferred]
    return reordered


def pair_forward_with_backward(program: Program) -> Program:
    """The program with a forward and a backward in one slot wherever possible; forwards and backwards keep their order.

    The ops of a pair must be independent, so forwards have to run further ahead. The lead is found by running the
    program in ticks: in a tick a rank runs its next forward and its next backward, each if it is ready. On 1F1B, 2
    ranks, 4 microbatches (backward in letters):

        tick       0    1    2    3    4    5    6
        rank 0     0    1    2    3a   b    c    d        3 = 2 (p - r - 1) + 1 forwards ahead
        rank 1          0    1a   2b   3c   d             1

    This lead is one deeper than interleaved 1F1B's, which costs one more live chunk: 2 (p - r - 1) + (v - 1) p + 2.
    """
    walk_program(program, ignore_slot)  # reports a deadlock, on which the ticks would not end
    last_stage = last_stage_of(program)
    finished: set[PipelineOp] = set()

    def is_ready(slot: Slot) -> bool:
        for op in slot:
            for need in op_dependencies(op, last_stage):
                if need not in finished and need not in slot:
                    return False
        return True

    lanes = [split_directions(slots) for slots in program]
    paired: Program = [[] for _ in program]
    while any(forwards or backwards for forwards, backwards in lanes):
        # One tick: ops of the same tick do not see each other's results.
        started: list[Slot] = []
        rows = zip(paired, lanes, strict=True)
        for slots, (forwards, backwards) in rows:
            taken = take_ready_slots(forwards, backwards, is_ready)
            slots += taken
            started += taken
        for slot in started:
            finished.update(slot)
    return paired


def ignore_slot(rank: int, slot: Slot) -> None:
    pass


def take_ready_slots(forwards: deque[Slot], backwards: deque[RankBackward], is_ready: SlotCondition) -> RankSlots:
    """The slots of a rank in one tick: its next forward and its next backward, in one slot where both are ready."""
    first_slot: Slot = ()
    lone_wgrads: list[Slot] = []
    if forwards and is_ready(forwards[0]):
        first_slot = forwards.popleft()
    if backwards and is_ready(backwards[0][0]):
        data_grad, *lone_wgrads = backwards.popleft()
        first_slot += data_grad
    slots = [first_slot, *lone_wgrads]
    return [slot for slot in slots if slot]


def split_directions(slots: RankSlots) -> tuple[deque[Slot], deque[RankBackward]]:
    """Forwards of a rank, and its backwards: each a slot with D, and the slots of lone W that follow it."""
    forwards: deque[Slot] = deque()
    backwards: deque[RankBackward] = deque()
    for slot in slots:
        forward = tuple(op for op in slot if op.kind == "F")
        backward = tuple(op for op in slot if op.kind != "F")
        if forward:
            forwards.append(forward)
        if any(op.kind == "D" for op in backward):
            backwards.append([backward])
        elif backward:
            backwards[-1].append(backward)
    return forwards, backwards


def pair_alike(program: Program) -> Program:
    """The program with two neighbouring microbatches in step: their forwards share slots, and their backwards do. The
    slots are those that the program has for the first half of its microbatches; twice as many are live, as in a run
    whose microbatches are twice as large. Of an odd number the last one is alone."""
    microbatches = 1 + max((op.microbatch for _, op in ops_with_ranks(program)), default=-1)
    pairs = (microbatches + 1) // 2
    paired: Program = []
    for slots in program:
        of_rank: list[Slot] = []
        for slot in slots:
            first_half = [op for op in slot if op.microbatch < pairs]
            both = [twin for op in first_half for twin in ops_in_step(op, microbatches)]
            if both:
                of_rank.append(tuple(both))
        paired.append(of_rank)
    return paired


def ops_in_step(op: PipelineOp, microbatches: int) -> Iterator[PipelineOp]:
    """The ops of the two microbatches for which an op's microbatch stands."""
    first = 2 * op.microbatch
    for microbatch in range(first, min(first + 2, microbatches)):
        yield op._replace(microbatch=microbatch)


PROGRAM_PASSES: dict[str, Callable[[Program], Program]] = {
    "pair": pair_forward_with_backward,
    "alike": pair_alike,
    "defer": defer_weight_grads,
}
