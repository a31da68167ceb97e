"""Checker of collectives (debug): before each one, ranks compare its kind, shape and call site through the store.

A wrong shape, another collective or a missing rank is then named within seconds, with both call sites, instead of a
hang or a wrong number. Costs a message per rank and collective, so it is off by default.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.config.errors import RunFailure
from moefold.layout.axes import Axis

PACKAGE_FOLDER = Path(__file__).parent.parent
TORCH_FOLDER = Path(torch.__file__).parent


class RowCount(NamedTuple):
    """Rows from one rank to another, as each of the two states it, with their call sites."""

    sender: int
    receiver: int
    sent: int
    expected: int
    sent_at: str
    expected_at: str


class CollectiveChecker:
    def __init__(self, store: dist.Store, rank: int, patience: float = 20.0):
        self.store = store
        self.rank = rank
        self.patience = timedelta(seconds=patience)
        self.turns: Counter[tuple[int, ...]] = Counter()  # collectives so far, by the ranks that take part

    def check(
        self, what: str, axis: Axis, terms: dict[str, Any], rows_to: list[int] | None, rows_from: list[int] | None
    ):
        """Publish this rank's next collective, read those of the other ranks, and fail on the first disagreement."""
        turn = self.turns[axis.ranks]
        self.turns[axis.ranks] += 1
        mine = {"what": what, "terms": terms, "to": rows_to, "from": rows_from, "at": nearest_call_site()}
        prefix = f"contract/{axis.name}/{axis.ranks}/{turn}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(mine))
        self.store.set(f"contract/last/{self.rank}", json.dumps({**mine, "axis": axis.name}))
        for index, other in enumerate(axis.ranks):
            theirs = self.read(f"{prefix}/{other}", other, mine, axis)
            if (mine["what"], mine["terms"]) != (theirs["what"], theirs["terms"]):
                raise RunFailure(self.describe_disagreement(axis, mine, theirs, other))
            if rows_to is not None and rows_from is not None:
                self.check_row_counts(axis, index, mine, theirs)

    def check_row_counts(self, axis: Axis, index: int, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Both directions are compared on both ranks, so that neither waits for the other."""
        other, here = axis.ranks[index], axis.index
        sent = RowCount(self.rank, other, mine["to"][index], theirs["from"][here], mine["at"], theirs["at"])
        received = RowCount(other, self.rank, theirs["to"][here], mine["from"][index], theirs["at"], mine["at"])
        for rows in (sent, received):
            if rows.sent != rows.expected:
                raise RunFailure(
                    f"{mine['what']} over {axis.name}: rank {rows.sender} sends {rows.sent} rows to rank "
                    f"{rows.receiver} at {rows.sent_at}, but rank {rows.receiver} expects {rows.expected} at "
                    f"{rows.expected_at}"
                )

    def read(self, name: str, other: int, mine: dict[str, Any], axis: Axis) -> dict[str, Any]:
        try:
            self.store.wait([name], self.patience)
        except (RuntimeError, dist.DistError):
            seconds = self.patience.total_seconds()
            raise RunFailure(
                f"rank {self.rank} waits in {mine['what']} over {axis.name} at {mine['at']}, but rank {other} did not "
                f"come within {seconds:g} s; {self.last_collective_of(other)}"
            ) from None
        return json.loads(self.store.get(name))

    def last_collective_of(self, other: int) -> str:
        name = f"contract/last/{other}"
        if not self.store.check([name]):
            return "it has begun no collective yet"
        last = json.loads(self.store.get(name))
        return f"its last was {last['what']} over {last['axis']} at {last['at']}"

    def describe_disagreement(self, axis: Axis, mine: dict[str, Any], theirs: dict[str, Any], other: int) -> str:
        one = describe_collective(mine)
        two = describe_collective(theirs)
        return f"ranks disagree on a collective over {axis.name}: rank {self.rank} does {one}, rank {other} does {two}"


def describe_collective(note: dict[str, Any]) -> str:
    return f"{note['what']} of {note['terms']} at {note['at']}"


def nearest_call_site() -> str:
    """File and line of the nearest caller outside of moefold/comm and torch."""
    frame = sys._getframe(1)
    while frame.f_back and is_comm_or_torch_file(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if is_comm_or_torch_file(path):
        return "the backward pass"
    inside_package = PACKAGE_FOLDER in path.parents
    shown = path.relative_to(PACKAGE_FOLDER.parent) if inside_package else path.name
    return f"{shown}:{frame.f_lineno}"


def is_comm_or_torch_file(path: Path) -> bool:
    return path.parent == PACKAGE_FOLDER / "comm" or TORCH_FOLDER in path.parents


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
    shape = x.shape if rows_to is None else x.shape[1:]
    terms = {"shape": list(shape), "dtype": str(x.dtype)}
    ACTIVE_CHECKERS[0].check(what, axis, terms, rows_to, rows_from)


@contextmanager
def checked_collectives(store: dist.Store, rank: int, patience: float = 20.0):
    """Check every collective inside the block."""
    ACTIVE_CHECKERS.append(CollectiveChecker(store, rank, patience))
    try:
        yield
    finally:
        ACTIVE_CHECKERS.pop()
