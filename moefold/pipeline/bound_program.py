"""One rank's part of a pipeline program with all that follows from the program alone.

Built once for each number of microbatches: a program of 8 pipeline ranks and 128 microbatches takes 0.1 s to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moefold.model.steps import PassKey
from moefold.pipeline.inbox import Homes, incoming_messages
from moefold.pipeline.last_gradients import StagesUsing, last_gradient_slots
from moefold.schedule.program import PipelineOp, Program, Slot, is_paired


@dataclass(frozen=True)
class BoundProgram:
    slots: Sequence[Slot]
    messages: Mapping[int, Sequence[PipelineOp]]  # by sending rank, in the order of sending
    paired_passes: frozenset[PassKey]  # passes with an op in a paired slot: they are cut at every step
    last_gradients: Mapping[int, set[str]]  # by slot number: parameters that get their last gradient there


def bind_program(program: Program, homes: Homes, rank: int, users: StagesUsing) -> BoundProgram:
    slots = program[rank]
    messages = incoming_messages(program, homes, rank)
    paired_passes = passes_of_paired_slots(slots)
    last_gradients = last_gradient_slots(slots, users)
    return BoundProgram(slots, messages, paired_passes, last_gradients)


def passes_of_paired_slots(slots: Sequence[Slot]) -> frozenset[PassKey]:
    passes: set[PassKey] = set()
    for slot in filter(is_paired, slots):
        for op in slot:
            key = op.stage, op.microbatch
            passes.add(key)
    return frozenset(passes)


def forward_program(homes: Homes, microbatches: int) -> Program:
    """Every stage's forward of every microbatch, stage by stage."""
    program: Program = []
    for rank in sorted(set(homes)):
        slots: list[Slot] = []
        for stage, home in enumerate(homes):
            if home != rank:
                continue
            for microbatch in range(microbatches):
                op = PipelineOp("F", stage, microbatch)
                slots.append((op,))
        program.append(slots)
    return program
