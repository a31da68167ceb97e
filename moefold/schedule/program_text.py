"""A program as a page of text: one line per rank, slots separated by spaces, the ops of one slot joined by `+`.

    # 1F1B, 2 ranks, 2 microbatches
    rank 0: F0.0 F0.1 D0.0+W0.0 D0.1+W0.1
    rank 1: F1.0 D1.0+W1.0 F1.1 D1.1+W1.1

`read(write(program))` is the program. What stands behind `#` is for people.
"""

from __future__ import annotations

import re
from typing import cast

from moefold.schedule.program import OpKind, PipelineOp, Program, Slot
from moefold.schedule.schedule_error import ScheduleError, first_problems, printable_excerpt

RANK_LINE = re.compile(r"rank\s+(\d{1,6})\s*:(.*)", re.ASCII)
OP_PATTERN = re.compile(r"([FDW])(\d{1,6})\.(\d{1,9})", re.ASCII)


def write_program(program: Program, title: str = "") -> str:
    lines = [f"# {title}"] if title else []
    for rank, slots in enumerate(program):
        lines.append(f"rank {rank}: " + " ".join("+".join(map(str, slot)) for slot in slots))
    return "\n".join(lines) + "\n"


def read_program(text: str) -> Program:
    """The program a text describes, its form checked and nothing else; `program.check` says whether it can run."""
    program: Program = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = RANK_LINE.fullmatch(line)
        if match is None or int(match[1]) != len(program):
            problems.append(
                f"line {number} starts with {printable_excerpt(line[:20])!r}; expected `rank {len(program)}:` and its slots, "
                f"such as `rank {len(program)}: F0.0 D0.0+W0.0`"
            )
            break  # every later rank would be off by one
        words = match[2].split()
        problems += [f"line {number}: {problem}" for word in words if (problem := slot_problem(word))]
        program.append([parse_slot(word) for word in words if not slot_problem(word)])
    if problems:
        raise ScheduleError(*first_problems(problems))
    return program


def slot_problem(slot: str) -> str:
    """What is wrong with the text of a slot, or nothing."""
    bad = [word for word in slot.split("+") if not OP_PATTERN.fullmatch(word)]
    return (
        f"cannot read {printable_excerpt(bad[0])!r}; expected F, D or W, stage, dot, microbatch, such as D2.5"
        if bad
        else ""
    )


def parse_slot(text: str) -> Slot:
    parts = [word.partition(".") for word in text.split("+")]
    return tuple(PipelineOp(cast(OpKind, head[0]), int(head[1:]), int(tail)) for head, _, tail in parts)
