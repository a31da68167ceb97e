"""Passes over a pipeline program: each returns a program that does the same work in another order.

    defer_weight_grads            D+W                ->   D  ...  W          weight gradients fill later gaps
    pair_forward_with_backward    F   D+W            ->   F+D+W              communication of one hides behind the other

Pairing comes first when both are wanted: `defer_weight_grads(pair_forward_with_backward(program))`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moefold.schedule.program import PipelineOp, Program, Slot, last_stage_of, op_dependencies, walk_program

RankBackward = list[Slot]  # a slot with D, then the slots of lone W that followed it


def defer_weight_grads(program: Program) -> Program:
    """Rank r defers r weight gradients: data gradients run first, and no rank holds more than rank 0 did."""
    return [defer_rank_wgrads(slots, limit=rank) for rank, slots in enumerate(program)]


def defer_rank_wgrads(slots: list[Slot], limit: int) -> list[Slot]:
    """The slots of a rank with at most `limit` weight gradients deferred at a time."""
    deferred: deque[PipelineOp] = deque()
    reordered: list[Slot] = []
    for slot in slots:
        weight_grads = [op for op in slot if op.kind == "W"]
        other_ops = tuple(op for op in slot if op.kind != "W")
        if other_ops:
            reordered.append(other_ops)
        deferred.extend(weight_grads)
        if weight_grads and len(deferred) > limit:
            oldest = deferred.popleft()
            reordered.append((oldest,))
    reordered += [(op,) for op in deferred]
    return reordered


def pair_forward_with_backward(program: Program) -> Program:
    """Each rank runs a forward and a backward in one slot wherever it can, each in the order it had.

    A pair must be independent, so forwards have to run further ahead. How far is found by running the program in
    ticks, in which a rank takes its next forward and its next backward, each if it is ready. On 1F1B, 2 ranks,
    4 microbatches (backward in letters):

        tick       0    1    2    3    4    5    6
        rank 0     0    1    2    3a   b    c    d        3 = 2 (p - r - 1) + 1 forwards ahead
        rank 1          0    1a   2b   3c   d             1

    This lead is one deeper than interleaved 1F1B's, which costs one more live chunk: 2 (p - r - 1) + (v - 1) p + 2.
    """
    walk_program(program, ignore_slot)  # a deadlock is reported before the ticks would wait for ever
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
        for slots, (forwards, backwards) in zip(paired, lanes, strict=True):
            taken = take_ready_slots(forwards, backwards, is_ready)
            slots += taken
            started += taken
        for slot in started:
            finished.update(slot)
    return paired


def ignore_slot(rank: int, slot: Slot) -> None:
    pass


def take_ready_slots(
    forwards: deque[Slot], backwards: deque[RankBackward], is_ready: Callable[[Slot], bool]
) -> list[Slot]:
    """What a rank runs in one tick: its next forward and its next backward, in one slot where both are ready."""
    first_slot: Slot = ()
    lone_wgrads: list[Slot] = []
    if forwards and is_ready(forwards[0]):
        first_slot = forwards.popleft()
    if backwards and is_ready(backwards[0][0]):
        data_grad, *lone_wgrads = backwards.popleft()
        first_slot += data_grad
    return [slot for slot in (first_slot, *lone_wgrads) if slot]


def split_directions(slots: list[Slot]) -> tuple[deque[Slot], deque[RankBackward]]:
    """A rank's forwards, and its backwards: each a slot with D, and the slots of lone W that followed it."""
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


PROGRAM_PASSES: dict[str, Callable[[Program], Program]] = {
    "pair": pair_forward_with_backward,
    "defer": defer_weight_grads,
}
