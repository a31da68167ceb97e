"""Passes rewrite a program into another that does the same work in another order: program -> program.

    defer_weight_grads            D+W                ->   D  ...  W          weight gradients fill later gaps
    pair_forward_with_backward    F   D+W            ->   F+D+W              communication of one hides behind the other

Pairing comes first when both are wanted: `defer_weight_grads(pair_forward_with_backward(program))`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moefold.schedule.program import PipelineOp, Program, Slot, last_stage_of, op_dependencies, walk_program


def defer_weight_grads(program: Program) -> Program:
    """Rank r lets r weight gradients wait: what others need comes first, and no rank holds more than rank 0 did."""
    return [defer_rank_wgrads(slots, hold=rank) for rank, slots in enumerate(program)]


def defer_rank_wgrads(slots: list[Slot], hold: int) -> list[Slot]:
    held: deque[PipelineOp] = deque()
    out: list[Slot] = []
    for slot in slots:
        weights = [op for op in slot if op.kind == "W"]
        rest = tuple(op for op in slot if op.kind != "W")
        out += [rest] if rest else []
        held.extend(weights)
        if weights and len(held) > hold:
            out.append((held.popleft(),))
    return out + [(op,) for op in held]


def pair_forward_with_backward(program: Program) -> Program:
    """Each rank runs a forward and a backward in one slot wherever it can, each in the order it had.

    A pair must be independent, so forwards have to run further ahead. How far is found by playing the program in
    ticks, in which a rank takes its next forward and its next backward, each if it is ready. On 1F1B, 2 ranks,
    4 microbatches (backward in letters):

        tick       0    1    2    3    4    5    6
        rank 0     0    1    2    3a   b    c    d        3 = 2 (p - r - 1) + 1 forwards ahead
        rank 1          0    1a   2b   3c   d             1

    This lead is one deeper than interleaved 1F1B's, which costs one more live chunk: 2 (p - r - 1) + (v - 1) p + 2.
    """
    walk_program(program, lambda rank, slot: None)
    last = last_stage_of(program)
    done: set[PipelineOp] = set()

    def inputs_are_ready(slot: Slot) -> bool:
        return all(need in done or need in slot for op in slot for need in op_dependencies(op, last))

    lanes = [split_directions(slots) for slots in program]
    paired: Program = [[] for _ in program]
    while any(forwards or backwards for forwards, backwards in lanes):
        taken: list[Slot] = []
        for slots, (forwards, backwards) in zip(paired, lanes, strict=True):
            forward = forwards.popleft() if forwards and inputs_are_ready(forwards[0]) else ()
            first, *rest = backwards.popleft() if backwards and inputs_are_ready(backwards[0][0]) else [()]
            new = [slot for slot in (forward + first, *rest) if slot]
            slots += new
            taken += new
        done.update(op for slot in taken for op in slot)
    return paired


def split_directions(slots: list[Slot]) -> tuple[deque[Slot], deque[list[Slot]]]:
    """A rank's forwards, and its backwards: each a slot with D, and the slots of lone W that followed it."""
    forwards: deque[Slot] = deque()
    backwards: deque[list[Slot]] = deque()
    for slot in slots:
        forward = tuple(op for op in slot if op.kind == "F")
        rest = tuple(op for op in slot if op.kind != "F")
        if forward:
            forwards.append(forward)
        if any(op.kind == "D" for op in rest):
            backwards.append([rest])
        elif rest:
            backwards[-1].append(rest)
    return forwards, backwards


PROGRAM_PASSES: dict[str, Callable[[Program], Program]] = {
    "pair": pair_forward_with_backward,
    "defer": defer_weight_grads,
}
