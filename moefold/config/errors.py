"""Exceptions that the command line prints without a traceback: exit code 2 for a user's error, 1 for a failed run. A
subclass may have an exit code of its own."""

from __future__ import annotations

from collections.abc import Iterable

from moefold.printable import did_you_mean, printable_text

__all__ = ["RunFailure", "UserError", "did_you_mean", "one_of", "printable_text"]


class UserError(Exception):
    """A request that cannot be met. Each problem names what was found, what was expected and what to do."""

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class RunFailure(Exception):
    """A failure at run time that no other input would have prevented: printed in one line, exit code 1."""


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known; otherwise refuse, listing the known names and the nearest."""
    names = sorted(known)
    if name in names:
        return name
    guess = did_you_mean(name, names)
    listed = ", ".join(names)
    raise UserError(f'no {what} "{printable_text(name)}"{guess}; there are: {listed}')


def all_of(what: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names if all are known; otherwise refuse the first that is not."""
    listed = list(known)
    return [one_of(what, name, listed) for name in names]
