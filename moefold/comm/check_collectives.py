"""Checker of collectives (debug): before each one, ranks compare its kind, shape and call site through the store.

A wrong shape, another collective or a missing rank is then named within seconds, with both call sites, instead of a
hang or a wrong number. Costs a message per rank and collective, so it is off by default.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moefold.config.errors import RunFailure
from moefold.layout.axes import Axis
from moefold.layout.fold import Ranks
from moefold.watch.call_sites import nearest_site


@dataclass(frozen=True)
class CollectiveNote:
    """One rank's next collective. `terms` must be equal on all ranks; `rows_to` and `rows_from` must match in pairs."""

    what: str
    axis: str
    terms: dict[str, Any]
    rows_to: list[int] | None
    rows_from: list[int] | None
    call_site: str

    def __str__(self) -> str:
        return f"{self.what} of {self.terms} at {self.call_site}"

    def encode_json(self) -> str:
        return json.dumps(asdict(self))


def decode_note(raw: bytes) -> CollectiveNote:
    return CollectiveNote(**json.loads(raw))


class CollectiveChecker:
    def __init__(self, store: dist.Store, rank: int, patience: float = 20.0):
        self.store = store
        self.rank = rank
        self.patience = timedelta(seconds=patience)
        self.turns: Counter[Ranks] = Counter()  # collectives so far, by the ranks that take part

    def check(self, mine: CollectiveNote, axis: Axis) -> None:
        """Publish this rank's next collective, read those of the other ranks, and fail on the first disagreement."""
        turn = self.turns[axis.ranks]
        self.turns[axis.ranks] += 1
        prefix = f"contract/{axis.name}/{axis.ranks}/{turn}"
        note = mine.encode_json()
        self.store.set(f"{prefix}/{self.rank}", note)
        self.store.set(f"contract/last/{self.rank}", note)
        for index, other in enumerate(axis.ranks):
            theirs = self.read_note(f"{prefix}/{other}", other, mine)
            if mine.what != theirs.what or mine.terms != theirs.terms:
                raise RunFailure(
                    f"ranks disagree on a collective over {axis.name}: rank {self.rank} does {mine}, "
                    f"rank {other} does {theirs}"
                )
            # Both directions are compared on both ranks, so that neither waits for the other.
            self.check_rows(mine, self.rank, axis.index, theirs, other, index)
            self.check_rows(theirs, other, index, mine, self.rank, axis.index)

    def check_rows(
        self, sends: CollectiveNote, sender: int, from_index: int, takes: CollectiveNote, receiver: int, to_index: int
    ) -> None:
        """Compare the rows that one rank sends to another with those that the other expects."""
        if sends.rows_to is None or takes.rows_from is None:
            return
        sent = sends.rows_to[to_index]
        expected = takes.rows_from[from_index]
        if sent != expected:
            raise RunFailure(
                f"{sends.what} over {sends.axis}: rank {sender} sends {sent} rows to rank {receiver} at "
                f"{sends.call_site}, but rank {receiver} expects {expected} at {takes.call_site}"
            )

    def read_note(self, name: str, other: int, mine: CollectiveNote) -> CollectiveNote:
        try:
            self.store.wait([name], self.patience)
        except (RuntimeError, dist.DistError):
            seconds = self.patience.total_seconds()
            last = self.last_collective_of(other)
            raise RunFailure(
                f"rank {self.rank} waits in {mine.what} over {mine.axis} at {mine.call_site}, but rank {other} did not "
                f"come within {seconds:g} s; {last}"
            ) from None
        return decode_note(self.store.get(name))

    def last_collective_of(self, other: int) -> str:
        name = f"contract/last/{other}"
        if not self.store.check([name]):
            return "it has begun no collective yet"
        last = decode_note(self.store.get(name))
        return f"its last was {last.what} over {last.axis} at {last.call_site}"


ACTIVE_CHECKERS: list[CollectiveChecker] = []


def check_agreement(
    what: str,
    axis: Axis,
    x: Tensor,
    rows_to: list[int] | None = None,
    rows_from: list[int] | None = None,
) -> None:
    """Check a collective on x, if a checker is active. The number of rows may differ between ranks where `rows_to` and
    `rows_from` are given."""
    if not ACTIVE_CHECKERS:
        return
    shape = list(x.shape)
    if rows_to is not None:
        del shape[0]
    terms = {"shape": shape, "dtype": str(x.dtype)}
    site = str(nearest_site(sys._getframe(1)))
    note = CollectiveNote(what, axis.name, terms, rows_to, rows_from, site)
    ACTIVE_CHECKERS[0].check(note, axis)


@contextmanager
def checked_collectives(store: dist.Store, rank: int, patience: float = 20.0):
    """Check every collective inside the block."""
    ACTIVE_CHECKERS.append(CollectiveChecker(store, rank, patience))
    try:
        yield
    finally:
        ACTIVE_CHECKERS.pop()
