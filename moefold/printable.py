"""User text as messages may repeat it, the nearest legal name for a misspelt one, and large numbers in few characters.
Torch-free, below all floors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_EXCERPT = 80
NUMBER_SUFFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def printable_text(text: str) -> str:
    """The user's text, safe to print: short, with control characters and lone surrogates escaped."""
    escaped = "".join(map(escape_character, text))
    if len(escaped) <= LONGEST_EXCERPT:
        return escaped
    return escaped[: LONGEST_EXCERPT - 3] + "..."


def escape_character(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)` for the nearest known name; empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{near[0]}"?)' if near else ""


def human_readable(number: float) -> str:
    """46702792704 -> 46.7 G."""
    for letter, size in NUMBER_SUFFIXES.items():
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"
