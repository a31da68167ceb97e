"""The one exception for what a user can mend: the command line prints it without a traceback and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something asked for cannot be done. Each problem says what is, what was expected and what to do."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class RunFailure(Exception):
    """Something broke while running that no other input would have prevented: told in one line, exit code 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{near[0]}"?)' if near else ""


def printable_text(text: str) -> str:
    """The user's own words as they may be shown again: short, control characters and lone surrogates escaped."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 80 else text[:77] + "..."


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known; otherwise refuse, listing what there is and the nearest."""
    names = sorted(known)
    if name in names:
        return name
    raise UserError(f'no {what} "{printable_text(name)}"{did_you_mean(name, names)}; there are: {", ".join(names)}')
