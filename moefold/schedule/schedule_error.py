"""What is wrong with a program, a layout or a table of costs, all of it told at once."""

from __future__ import annotations

from collections.abc import Sequence


class ScheduleError(ValueError):
    """Each problem says what is, what was expected and what to do."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


def first_problems(found: Sequence[str], most: int = 4) -> list[str]:
    """The first few of many problems of one kind, and how many more there are."""
    return [*found[:most], *([f"... and {len(found) - most} more of that kind"] if len(found) > most else [])]


def printable_excerpt(text: str) -> str:
    """A user's own words as they may be repeated: short, and with nothing that acts on a terminal."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 80 else text[:77] + "..."
