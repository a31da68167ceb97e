"""Entries of an open tape (memory/tape.py): functions that a recorded step calls as a whole.

A recorded step runs the same ops in every replay, so it cannot branch on values. A function that has to, such as an
update that is left out where a gradient is not finite, is one entry of the tape: a replay calls the function again, on
the same memory, and the function reads on the host what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar

WritingFunction = Callable[..., None]
Arguments = tuple[Any, ...]
F = TypeVar("F", bound=WritingFunction)


class OpenTape(Protocol):
    def call_whole(self, function: WritingFunction, args: tuple[Any, ...]) -> None:
        """Call the function, which writes to its arguments, and record the call instead of what it runs."""
        ...


OPEN_TAPES: list[OpenTape] = []


def one_entry(function: WritingFunction) -> WritingFunction:
    """The function; while a tape is open, its calls are entries of that tape."""

    @wraps(function)
    def call(*args: Any) -> None:
        if OPEN_TAPES:
            OPEN_TAPES[-1].call_whole(function, args)
        else:
            function(*args)

    return call


class EntryFacts(NamedTuple):
    """What two processes that share a replay (memory/shared_replay.py) may know of an entry.

    `written`: how many of the first arguments it writes; None: any. `halves`: makes of its arguments those of two calls
    that do the same together, in any order, to the same bits; none where there is nothing to divide.
    """

    written: int | None = None
    halves: Callable[..., Sequence[Arguments]] | None = None


ENTRY_FACTS: dict[WritingFunction, EntryFacts] = {}


def entry_facts(
    written: int | None = None, halves: Callable[..., Sequence[Arguments]] | None = None
) -> Callable[[F], F]:
    def note(function: F) -> F:
        ENTRY_FACTS[function] = EntryFacts(written, halves)
        return function

    return note
