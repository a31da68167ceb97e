"""Entries of a file: texts, token ids, and what cannot be read, each bad entry with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from moefold.config.errors import UserError
from moefold.data.document_split import DocumentTokens
from moefold.data.tokenizer import Tokenizer

SCANNED_TOKENS = 1 << 22  # ids that are searched for end tokens at a time


class TokenIds(NamedTuple):
    """Token ids from a file that holds tokens instead of text. `place` is for messages."""

    ids: np.ndarray
    place: str


class Record(NamedTuple):
    """The fields of a line or row, of which a sample is made. `place` is for messages, and asked for when one is."""

    fields: dict[str, Any]
    place: Callable[[], str]


class SampleReader(Protocol):
    """Makes documents of the fields of a record. A malformed record is refused with a ValueError that completes "FILE,
    line N ...". `identity`: what decides the tokens beside the tokenizer."""

    identity: str

    def documents(self, fields: dict[str, Any]) -> list[DocumentTokens]: ...


class BadEntry(NamedTuple):
    """What cannot be read. `problem` names the file and the line, row or offset."""

    problem: str


Entry = str | TokenIds | Record | BadEntry
Entries = Iterator[Entry]


class BadEntries:
    """Bad entries of a reading: each is refused, or listed where they are skipped. `prefix` begins a refusal."""

    def __init__(self, skips: bool, prefix: str = ""):
        self.skips = skips
        self.prefix = prefix
        self.problems: list[str] = []

    def note(self, problem: str) -> None:
        if not self.skips:
            raise UserError(f"{self.prefix}{problem}; or leave out what cannot be read with --data.skip_bad true")
        self.problems.append(problem)


def entry_documents(
    entry: Entry,
    tokenizer: Tokenizer,
    bad: BadEntries,
    samples: SampleReader | None = None,
) -> Iterator[DocumentTokens]:
    """The documents of an entry. Ids of a file are cut behind every end token."""
    if isinstance(entry, BadEntry):
        bad.note(entry.problem)
    elif isinstance(entry, str):
        ids = tokenizer.encode(entry)
        yield DocumentTokens(ids)
    elif isinstance(entry, Record):
        yield from record_documents(entry, samples, bad)
    else:
        for ids in cut_behind(entry.ids, tokenizer.end.id):
            problem = id_problem(ids, tokenizer.size)
            if problem is None:
                yield DocumentTokens(ids)
            else:
                bad.note(f"{entry.place}: {problem}")


def record_documents(record: Record, samples: SampleReader | None, bad: BadEntries) -> list[DocumentTokens]:
    assert samples is not None, "records are read where data.format says what they hold"
    try:
        return samples.documents(record.fields)
    except ValueError as problem:
        bad.note(f"{record.place()} {problem}")
        return []


def id_problem(ids: np.ndarray, size: int) -> str | None:
    """What is wrong with the ids; None where all are tokens."""
    if not len(ids):
        return None
    extremes = ids.min(), ids.max()
    for extreme in map(int, extremes):
        if not 0 <= extreme < size:
            places = np.flatnonzero(ids == extreme)
            offset = int(places[0])
            return f"id {extreme} (at offset {offset} of its document) is no token; expected 0 to {size - 1}"
    return None


def cut_behind(ids: np.ndarray, end: int) -> Iterator[np.ndarray]:
    """The parts of an array between end tokens, in order; an empty part behind the last end token is none."""
    start = 0
    for scanned in range(0, len(ids), SCANNED_TOKENS):
        window = ids[scanned : scanned + SCANNED_TOKENS]
        found = np.flatnonzero(window == end)
        for position in found.tolist():
            stop = scanned + position
            yield ids[start:stop]
            start = stop + 1
    if start < len(ids):
        yield ids[start:]
