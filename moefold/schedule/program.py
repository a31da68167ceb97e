"""Pipeline programs: per rank a list of slots, per slot the ops that may run interleaved with each other.

There are three kinds of op: F forward, D data gradient, W weight gradient. A classic backward is D and W in one slot.
An op is written kind, stage, microbatch: D2.5 is the data gradient of microbatch 5 through stage 2. Stage 0 holds the
embedding, the last one the loss. 1F1B on 2 ranks with 2 microbatches is

    rank 0:   F0.0   F0.1   D0.0+W0.0   D0.1+W0.1
    rank 1:   F1.0   D1.0+W1.0   F1.1   D1.1+W1.1

and in time

    rank 0    F0.0 F0.1           D0.0 W0.0           D0.1 W0.1
    rank 1         F1.0 D1.0 W1.0 F1.1 D1.1 W1.1

Gaps are not written: they follow from `op_dependencies`, the one statement of causality. The executor runs a program,
`simulate_program` simulates it, `draw_svg` draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Literal, NamedTuple

from moefold.schedule.schedule_error import ScheduleError, first_problems

OpKind = Literal["F", "D", "W"]
OP_KINDS: tuple[OpKind, ...] = ("F", "D", "W")


class PipelineOp(NamedTuple):
    kind: OpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Slot = tuple[PipelineOp, ...]
RankSlots = list[Slot]
Program = list[RankSlots]
RankOfOps = dict[PipelineOp, int]
OpCounts = Counter[PipelineOp]
Limit = int | None  # a number of stages or microbatches, or what the program itself has


def op_dependencies(op: PipelineOp, last_stage: int) -> list[PipelineOp]:
    """Ops that must have finished, on any rank, before `op` may start."""
    kind, stage, microbatch = op
    if kind == "W":
        return [PipelineOp("D", stage, microbatch)]
    if kind == "D":
        needs = [PipelineOp("F", stage, microbatch)]
        if stage < last_stage:
            following = PipelineOp("D", stage + 1, microbatch)
            needs.append(following)
        return needs
    if stage == 0:
        return []
    return [PipelineOp("F", stage - 1, microbatch)]


def ops_with_ranks(program: Program) -> Iterator[tuple[int, PipelineOp]]:
    """Every op with its rank, in each rank's order."""
    for rank, slots in enumerate(program):
        for slot in slots:
            for op in slot:
                yield rank, op


def last_stage_of(program: Program) -> int:
    stages = (op.stage for _, op in ops_with_ranks(program))
    return max(stages, default=-1)


def rank_by_stage(program: Program) -> list[int]:
    """Rank of each stage, from the program: `rank_by_stage(program)[stage]`."""
    homes = {op.stage: rank for rank, op in ops_with_ranks(program)}
    return [homes[stage] for stage in range(len(homes))]


def is_paired(slot: Slot) -> bool:
    """Whether passes of several microbatches share the slot, so that one's communication overlaps the other's
    compute."""
    passes = [op for op in slot if op.kind != "W"]
    return len(passes) > 1


def slot_text(slot: Slot) -> str:
    return "+".join(map(str, slot))


def walk_program(program: Program, finish: Callable[[int, Slot], object]) -> None:
    """Visit all slots in an order every rank could follow, calling `finish(rank, slot)` on each.

    A slot starts when all dependencies of its ops have finished, except ops of the slot itself. Raises ScheduleError on
    a deadlock, with the rank and the missing ops.
    """
    last_stage = last_stage_of(program)
    finished: set[PipelineOp] = set()
    position = [0] * len(program)

    def unmet_dependencies(slot: Slot) -> list[PipelineOp]:
        unmet: list[PipelineOp] = []
        for op in slot:
            for need in op_dependencies(op, last_stage):
                if need not in finished and need not in slot:
                    unmet.append(need)
        return unmet

    # A round runs every rank as far as possible; a round without progress is the end or a deadlock.
    progress = True
    while progress:
        progress = False
        for rank, slots in enumerate(program):
            remaining = slots[position[rank] :]
            for slot in remaining:
                if unmet_dependencies(slot):
                    break
                finish(rank, slot)
                finished.update(slot)
                position[rank] += 1
                progress = True

    deadlocks: list[str] = []
    homes = rank_of_ops(program)
    for rank, slots in enumerate(program):
        if position[rank] < len(slots):
            slot = slots[position[rank]]
            unmet = unmet_dependencies(slot)
            deadlocks.append(describe_deadlock(rank, slot, unmet, homes))
    if deadlocks:
        raise ScheduleError(*first_problems(deadlocks))


def rank_of_ops(program: Program) -> RankOfOps:
    return {op: rank for rank, op in ops_with_ranks(program)}


def describe_deadlock(rank: int, slot: Slot, missing: list[PipelineOp], homes: RankOfOps) -> str:
    """Line of one rank in a deadlock: its next slot, and the ops that must run before."""
    reasons: dict[PipelineOp, str] = {}
    for op in missing:
        place = "no rank runs"
        if op in homes:
            place = f"rank {homes[op]} only runs later"
        reasons[op] = f"{op}, which {place}"
    waits_for = " and ".join(reasons.values())
    return f"deadlock: rank {rank} waits at {slot_text(slot)} for {waits_for}; move the missing ops up"


def program_problems(program: Program, stages: Limit = None, microbatches: Limit = None) -> list[str]:
    """Every reason why a program is not one whole training step; empty if it is one.

    Without `stages` and `microbatches`, the largest of each in the program are used.
    """
    op_counts = Counter(op for _, op in ops_with_ranks(program))
    if not op_counts:
        return ["the program has no op; expected at least F0.0 and then D0.0+W0.0 on rank 0"]
    if not stages:
        stages = last_stage_of(program) + 1
    if not microbatches:
        microbatches = max(op.microbatch for op in op_counts) + 1
    problems_by_kind = (
        find_unknown_ops(program, stages, microbatches),
        find_repeated_ops(program, op_counts),
        find_missing_ops(program, op_counts, stages, microbatches),
        find_scattered_stages(program),
        find_entangled_slots(program, stages - 1),
    )
    problems: list[str] = []
    for of_kind in problems_by_kind:
        problems += first_problems(of_kind)
    return problems or deadlock_problems(program)


def deadlock_problems(program: Program) -> list[str]:
    try:
        walk_program(program, lambda rank, slot: None)
    except ScheduleError as deadlock:
        return list(deadlock.problems)
    return []


def check_program(program: Program, stages: Limit = None, microbatches: Limit = None) -> Program:
    """Return the program if it is one whole training step; otherwise raise ScheduleError with all problems."""
    problems = program_problems(program, stages, microbatches)
    if problems:
        raise ScheduleError(*problems)
    return program


def find_unknown_ops(program: Program, stages: int, microbatches: int) -> list[str]:
    """Ops of stages or microbatches that do not exist."""
    bounds = f"there are {stages} stages and {microbatches} microbatches, both counted from 0"
    problems: list[str] = []
    for rank, op in ops_with_ranks(program):
        if op.stage >= stages or op.microbatch >= microbatches:
            problems.append(f"rank {rank} runs {op}, but {bounds}; leave it out")
    return problems


def find_repeated_ops(program: Program, op_counts: OpCounts) -> list[str]:
    problems: list[str] = []
    for op, count in op_counts.items():
        if count == 1:
            continue
        ranks: list[str] = []
        for rank, other in ops_with_ranks(program):
            if other == op:
                ranks.append(str(rank))
        names = ", ".join(ranks)
        problems.append(f"{op} runs {count} times, on rank {names}; expected once: keep one")
    return problems


def find_missing_ops(program: Program, op_counts: OpCounts, stages: int, microbatches: int) -> list[str]:
    """Ops of a microbatch that are missing from the program."""
    homes = {op.stage: rank for rank, op in ops_with_ranks(program)}
    expected = f"expected F, D and W of every microbatch 0 to {microbatches - 1}"
    problems: list[str] = []
    for stage in range(stages):
        if stage not in homes:
            problems.append(f"no rank runs stage {stage} of {stages}; give it to one")
            continue
        for microbatch, kind in product(range(microbatches), OP_KINDS):
            op = PipelineOp(kind, stage, microbatch)
            if op not in op_counts:
                problems.append(f"rank {homes[stage]} drops {op}; {expected}: add it")
    return problems


def find_scattered_stages(program: Program) -> list[str]:
    """Stages whose ops are on several ranks, though their weights are on one."""
    homes: dict[int, set[int]] = {}
    for rank, op in ops_with_ranks(program):
        ranks = homes.setdefault(op.stage, set())
        ranks.add(rank)
    problems: list[str] = []
    for stage, ranks in sorted(homes.items()):
        if len(ranks) > 1:
            listed = map(str, sorted(ranks))
            names = ", ".join(listed)
            problems.append(f"stage {stage} runs on ranks {names}; expected one: its weights are there")
    return problems


def find_entangled_slots(program: Program, last_stage: int) -> list[str]:
    """Slots whose ops depend on each other: only a weight gradient may follow its own data gradient in a slot."""
    problems: list[str] = []
    for rank, slots in enumerate(program):
        for slot in slots:
            for op, need in entangled_ops(slot, last_stage):
                clash = f"rank {rank} puts {slot_text(slot)} into one slot, but {op} needs {need} finished"
                problems.append(f"{clash}; put it into a later slot")
    return problems


def entangled_ops(slot: Slot, last_stage: int) -> Iterator[tuple[PipelineOp, PipelineOp]]:
    """Each op of a slot that depends on another op of it, with the first such dependency."""
    for position, op in enumerate(slot):
        needs = op_dependencies(op, last_stage)
        inside = [need for need in needs if need in slot]
        earlier_ops = slot[:position]
        for need in inside:
            if op.kind != "W" or need not in earlier_ops:
                yield op, inside[0]
                break
