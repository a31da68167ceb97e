"""A pipeline schedule is data: per rank a list of slots, per slot the ops that may run woven into each other.

There are three kinds of op: F forward, D data gradient, W weight gradient. A classic backward is D and W in one slot.
An op is written kind, stage, microbatch: D2.5 is the data gradient of microbatch 5 through stage 2. Stage 0 holds the
embedding, the last one the loss. 1F1B on 2 ranks with 2 microbatches is

    rank 0:   F0.0   F0.1   D0.0+W0.0   D0.1+W0.1
    rank 1:   F1.0   D1.0+W1.0   F1.1   D1.1+W1.1

and in time

    rank 0    F0.0 F0.1           D0.0 W0.0           D0.1 W0.1
    rank 1         F1.0 D1.0 W1.0 F1.1 D1.1 W1.1

Gaps are not written: they follow from `needs`, the one statement of causality. The executor runs a program, the
simulator clocks it, the drawing shows it: one program, three readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from moefold.schedule.schedule_error import ScheduleError, first_problems

OpKind = Literal["F", "D", "W"]


class PipelineOp(NamedTuple):
    kind: OpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Slot = tuple[PipelineOp, ...]
Program = list[list[Slot]]


def op_dependencies(op: PipelineOp, last_stage: int) -> list[PipelineOp]:
    """What must have finished, on any rank, before `op` may start."""
    kind, stage, microbatch = op
    if kind == "F":
        return [PipelineOp("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "D":
        return [
            PipelineOp("F", stage, microbatch),
            *([PipelineOp("D", stage + 1, microbatch)] if stage < last_stage else []),
        ]
    return [PipelineOp("D", stage, microbatch)]


def ops_with_ranks(program: Program) -> Iterator[tuple[int, PipelineOp]]:
    """Every op with its rank, in each rank's order."""
    return ((rank, op) for rank, slots in enumerate(program) for slot in slots for op in slot)


def last_stage_of(program: Program) -> int:
    return max((op.stage for _, op in ops_with_ranks(program)), default=-1)


def rank_by_stage(program: Program) -> list[int]:
    """Which rank holds which stage: `rank_of(program)[stage]`, read off the program itself."""
    homes = {op.stage: rank for rank, op in ops_with_ranks(program)}
    return [homes[stage] for stage in range(len(homes))]


def is_paired(slot: Slot) -> bool:
    """Whether a forward and a backward share the slot, so that one's communication faces the other's compute."""
    kinds = {op.kind for op in slot}
    return "F" in kinds and "D" in kinds


def walk_program(program: Program, finish: Callable[[int, Slot], object]) -> None:
    """Visit all slots in an order every rank could follow, calling `finish(rank, slot)` on each.

    A slot starts when all that its ops need has finished, its own ops aside. Raises Unsound on a deadlock, naming who
    waits for what.
    """
    last = last_stage_of(program)
    done: set[PipelineOp] = set()
    cursor = [0] * len(program)

    def unmet_dependencies(slot: Slot) -> list[PipelineOp]:
        return [need for op in slot for need in op_dependencies(op, last) if need not in done and need not in slot]

    moved = True
    while moved:
        moved = False
        for rank, slots in enumerate(program):
            while cursor[rank] < len(slots) and not unmet_dependencies(slots[cursor[rank]]):
                slot = slots[cursor[rank]]
                finish(rank, slot)
                done.update(slot)
                cursor[rank] += 1
                moved = True
    stuck = [(rank, slots[at]) for rank, (at, slots) in enumerate(zip(cursor, program, strict=True)) if at < len(slots)]
    if stuck:
        homes = {op: rank for rank, op in ops_with_ranks(program)}
        raise ScheduleError(
            *first_problems([describe_deadlock(rank, slot, unmet_dependencies(slot), homes) for rank, slot in stuck])
        )


def describe_deadlock(rank: int, slot: Slot, missing: Iterable[PipelineOp], homes: dict[PipelineOp, int]) -> str:
    """One rank's line of a deadlock: where it stands and who should have come first."""
    where = {op: f"rank {homes[op]} only runs later" if op in homes else "no rank runs" for op in missing}
    reasons = " and ".join(f"{op}, which {place}" for op, place in where.items())
    return f"deadlock: rank {rank} waits at {'+'.join(map(str, slot))} for {reasons}; move what is waited for up"


def program_problems(program: Program, stages: int | None = None, microbatches: int | None = None) -> list[str]:
    """Everything that keeps a program from being one whole training step; nothing when it is one.

    Without `stages` and `microbatches`, the largest of each in the program count.
    """
    seen = Counter(op for _, op in ops_with_ranks(program))
    if not seen:
        return ["the program has no op; expected at least F0.0 and then D0.0+W0.0 on rank 0"]
    stages = stages or last_stage_of(program) + 1
    microbatches = microbatches or max(op.microbatch for op in seen) + 1
    problems = [
        *first_problems(find_unknown_ops(program, stages, microbatches)),
        *first_problems(find_repeated_ops(program, seen)),
        *first_problems(find_missing_ops(program, seen, stages, microbatches)),
        *first_problems(find_scattered_stages(program)),
        *first_problems(find_entangled_slots(program, stages - 1)),
    ]
    if not problems:
        try:
            walk_program(program, lambda rank, slot: None)
        except ScheduleError as deadlock:
            return list(deadlock.problems)
    return problems


def check_program(program: Program, stages: int | None = None, microbatches: int | None = None) -> Program:
    """Return the program if it is one whole training step; otherwise raise Unsound with all that is wrong."""
    if problems := program_problems(program, stages, microbatches):
        raise ScheduleError(*problems)
    return program


def find_unknown_ops(program: Program, stages: int, microbatches: int) -> list[str]:
    """Ops of stages or microbatches that do not exist."""
    return [
        f"rank {rank} runs {op}, but there are {stages} stages and {microbatches} microbatches, both counted from 0; "
        f"leave it out"
        for rank, op in ops_with_ranks(program)
        if op.stage >= stages or op.microbatch >= microbatches
    ]


def find_repeated_ops(program: Program, seen: Counter[PipelineOp]) -> list[str]:
    twice = {
        op: [rank for rank, other in ops_with_ranks(program) if other == op] for op, count in seen.items() if count > 1
    }
    return [
        f"{op} runs {len(ranks)} times, on rank {', '.join(map(str, ranks))}; expected once: keep one"
        for op, ranks in twice.items()
    ]


def find_missing_ops(program: Program, seen: Counter[PipelineOp], stages: int, microbatches: int) -> list[str]:
    """Ops that every microbatch must pass and this program drops."""
    homes = {op.stage: rank for rank, op in ops_with_ranks(program)}
    found: list[str] = []
    for stage in range(stages):
        if stage not in homes:
            found.append(f"no rank runs stage {stage} of {stages}; give it to one")
            continue
        found += [
            f"rank {homes[stage]} drops {op}; expected F, D and W of every microbatch 0 to {microbatches - 1}: add it"
            for microbatch in range(microbatches)
            for op in (
                PipelineOp("F", stage, microbatch),
                PipelineOp("D", stage, microbatch),
                PipelineOp("W", stage, microbatch),
            )
            if op not in seen
        ]
    return found


def find_scattered_stages(program: Program) -> list[str]:
    """Stages whose ops are on several ranks, though their weights are on one."""
    homes: dict[int, set[int]] = {}
    for rank, op in ops_with_ranks(program):
        homes.setdefault(op.stage, set()).add(rank)
    return [
        f"stage {stage} runs on ranks {', '.join(map(str, sorted(ranks)))}; expected one: its weights are there"
        for stage, ranks in sorted(homes.items())
        if len(ranks) > 1
    ]


def find_entangled_slots(program: Program, last_stage: int) -> list[str]:
    """Slots whose ops need each other: only a weight gradient may stand behind its own data gradient."""
    found: list[str] = []
    for rank, slots in enumerate(program):
        for slot in slots:
            for at, op in enumerate(slot):
                inside = [need for need in op_dependencies(op, last_stage) if need in slot]
                if any(op.kind != "W" or need not in slot[:at] for need in inside):
                    found.append(
                        f"rank {rank} puts {'+'.join(map(str, slot))} into one slot, but {op} needs {inside[0]} "
                        f"finished; put it into a later slot"
                    )
    return found
