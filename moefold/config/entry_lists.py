"""Lists of entries such as `PATTERN: OPTIONS`, each of which is parsed by itself; all problems are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from moefold.config.errors import UserError, printable_text

T = TypeVar("T")


def parse_each_entry(key: str, entries: Iterable[str], parse_entry: Callable[[str], T]) -> list[T]:
    """The parsed entries of a configuration key, in order. `parse_entry` refuses with a ValueError; all entries that
    cannot be read are refused at once."""
    parsed: list[T] = []
    problems: list[str] = []
    for entry in entries:
        try:
            parsed.append(parse_entry(entry))
        except ValueError as error:
            problems.append(f"{key} = {printable_text(entry)}: {error}")
    if problems:
        raise UserError(*problems)
    return parsed


def problems_of_entries(parse_list: Callable[[Iterable[str]], object], entries: Iterable[str]) -> str:
    """The problems of a list as text; empty if all entries can be read."""
    try:
        parse_list(entries)
    except UserError as error:
        return "; ".join(error.problems)
    return ""
