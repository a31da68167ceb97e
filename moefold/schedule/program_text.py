"""The text form of a pipeline program: one line per rank, slots separated by spaces, ops of a slot joined by `+`.

    # 1F1B, 2 ranks, 2 microbatches
    rank 0: F0.0 F0.1 D0.0+W0.0 D0.1+W0.1
    rank 1: F1.0 D1.0+W1.0 F1.1 D1.1+W1.1

`read_program(write_program(program))` is the program. Text after `#` is a comment.
"""

from __future__ import annotations

import re
from typing import cast

from moefold.printable import printable_text
from moefold.schedule.program import OpKind, PipelineOp, Program, Slot, slot_text
from moefold.schedule.schedule_error import ScheduleError, first_problems

RANK_LINE = re.compile(r"rank\s+(\d{1,6})\s*:(.*)", re.ASCII)
OP_PATTERN = re.compile(r"([FDW])(\d{1,6})\.(\d{1,9})", re.ASCII)


def write_program(program: Program, title: str = "") -> str:
    lines: list[str] = []
    if title:
        lines.append(f"# {title}")
    for rank, slots in enumerate(program):
        words = " ".join(map(slot_text, slots))
        lines.append(f"rank {rank}: {words}")
    return "\n".join(lines) + "\n"


def read_program(text: str) -> Program:
    """The program that a text describes. Only its form is checked here; `program.check_program` checks the rest."""
    program: Program = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = RANK_LINE.fullmatch(content)
        expected_rank = len(program)
        if match is None or int(match[1]) != expected_rank:
            problems.append(rank_line_problem(number, content, expected_rank))
            break  # every later rank would be off by one
        slots: list[Slot] = []
        for word in match[2].split():
            if problem := slot_problem(word):
                problems.append(f"line {number}: {problem}")
            else:
                slots.append(parse_slot(word))
        program.append(slots)
    if problems:
        raise ScheduleError(*first_problems(problems))
    return program


def rank_line_problem(number: int, line: str, rank: int) -> str:
    start = printable_text(line[:20])
    example = f"`rank {rank}: F0.0 D0.0+W0.0`"
    return f"line {number} starts with {start!r}; expected `rank {rank}:` and its slots, such as {example}"


def slot_problem(text: str) -> str:
    """The problem of a slot's text, or nothing."""
    for word in text.split("+"):
        if not OP_PATTERN.fullmatch(word):
            excerpt = printable_text(word)
            return f"cannot read {excerpt!r}; expected F, D or W, stage, dot, microbatch, such as D2.5"
    return ""


def parse_slot(text: str) -> Slot:
    words = text.split("+")
    return tuple(map(parse_op, words))


def parse_op(word: str) -> PipelineOp:
    head, _, microbatch = word.partition(".")
    kind = cast(OpKind, head[0])
    stage = int(head[1:])
    return PipelineOp(kind, stage, int(microbatch))
