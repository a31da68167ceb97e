"""Errors of a program, a stage layout or a table of stage costs, all problems at once."""

from __future__ import annotations

from collections.abc import Sequence


class ScheduleError(ValueError):
    """Problems of a schedule. Each names what was found, what was expected and what to do."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


def first_problems(problems: Sequence[str], limit: int = 4) -> list[str]:
    """The first few of many problems of one kind, and the number of the others."""
    shown = list(problems[:limit])
    hidden = len(problems) - limit
    if hidden > 0:
        shown.append(f"... and {hidden} more of that kind")
    return shown
