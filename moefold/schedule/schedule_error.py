"""Errors of a program, a stage layout or a table of stage costs, all problems at once."""

from __future__ import annotations

from collections.abc import Sequence

EXCERPT_LENGTH = 80


class ScheduleError(ValueError):
    """Each problem says what is, what was expected and what to do."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


def first_problems(problems: Sequence[str], limit: int = 4) -> list[str]:
    """The first few of many problems of one kind, and how many more there are."""
    shown = list(problems[:limit])
    hidden = len(problems) - limit
    if hidden > 0:
        shown.append(f"... and {hidden} more of that kind")
    return shown


def printable_excerpt(text: str) -> str:
    """A user's input as an error may repeat it: short, and without control characters."""
    escaped = "".join(map(escape_unprintable, text))
    if len(escaped) <= EXCERPT_LENGTH:
        return escaped
    return escaped[: EXCERPT_LENGTH - 3] + "..."


def escape_unprintable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
