"""Debug mode: before every collective the ranks tell each other what they are about to do, and where.

A wrong shape, another collective or a partner who never comes is then named within seconds, with both places in the
code, instead of a hang or a wrong number. Costs a message per rank and collective, so it is off unless asked for.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moefold.config.errors import RunFailure
from moefold.layout.axes import Axis

PACKAGE_FOLDER = Path(__file__).parent.parent
TORCH_FOLDER = Path(torch.__file__).parent


class CollectiveChecker:
    def __init__(self, store: dist.Store, rank: int, patience: float = 20.0):
        self.store, self.rank, self.patience = store, rank, timedelta(seconds=patience)
        self.turns: Counter[tuple[int, ...]] = Counter()

    def check(
        self, what: str, axis: Axis, terms: dict[str, Any], rows_to: list[int] | None, rows_from: list[int] | None
    ):
        """Publish what this rank is about to do, read what the others are, and fail on the first disagreement."""
        turn = self.turns[axis.ranks]
        self.turns[axis.ranks] += 1
        mine = {"what": what, "terms": terms, "to": rows_to, "from": rows_from, "at": nearest_call_site()}
        prefix = f"contract/{axis.name}/{axis.ranks}/{turn}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(mine))
        self.store.set(f"contract/last/{self.rank}", json.dumps({**mine, "axis": axis.name}))
        for place, other in enumerate(axis.ranks):
            theirs = self.read(f"{prefix}/{other}", other, mine, axis)
            if (mine["what"], mine["terms"]) != (theirs["what"], theirs["terms"]):
                raise RunFailure(self.describe_disagreement(axis, mine, theirs, other))
            if rows_to is None or rows_from is None:
                continue
            for giver, taker, sent, expected in (
                ((self.rank, mine), (other, theirs), rows_to[place], theirs["from"][axis.index]),
                ((other, theirs), (self.rank, mine), theirs["to"][axis.index], rows_from[place]),
            ):  # both notice, so that neither waits for the other
                if sent != expected:
                    raise RunFailure(
                        f"{what} over {axis.name}: rank {giver[0]} sends {sent} rows to rank {taker[0]} at "
                        f"{giver[1]['at']}, but rank {taker[0]} expects {expected} at {taker[1]['at']}"
                    )

    def read(self, name: str, other: int, mine: dict[str, Any], axis: Axis) -> dict[str, Any]:
        try:
            self.store.wait([name], self.patience)
        except (RuntimeError, dist.DistError):
            raise RunFailure(
                f"rank {self.rank} waits in {mine['what']} over {axis.name} at {mine['at']}, but rank {other} did not "
                f"come within {self.patience.total_seconds():g} s; {self.last_collective_of(other)}"
            ) from None
        return json.loads(self.store.get(name))

    def last_collective_of(self, other: int) -> str:
        name = f"contract/last/{other}"
        if not self.store.check([name]):
            return "it has begun no collective yet"
        last = json.loads(self.store.get(name))
        return f"its last was {last['what']} over {last['axis']} at {last['at']}"

    def describe_disagreement(self, axis: Axis, mine: dict[str, Any], theirs: dict[str, Any], other: int) -> str:
        one, two = (f"{m['what']} of {m['terms']} at {m['at']}" for m in (mine, theirs))
        return f"ranks disagree on a collective over {axis.name}: rank {self.rank} does {one}, rank {other} does {two}"


def nearest_call_site() -> str:
    """The nearest caller outside of this room and of torch."""
    frame = sys._getframe(1)
    while frame.f_back and is_comm_or_torch_file(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if is_comm_or_torch_file(path):
        return "the backward pass"
    shown = path.relative_to(PACKAGE_FOLDER.parent) if PACKAGE_FOLDER in path.parents else path.name
    return f"{shown}:{frame.f_lineno}"


def is_comm_or_torch_file(path: Path) -> bool:
    return path.parent == PACKAGE_FOLDER / "comm" or TORCH_FOLDER in path.parents


ACTIVE_CHECKERS: list[CollectiveChecker] = []


def check_agreement(
    what: str,
    axis: Axis,
    x: torch.Tensor,
    rows_to: list[int] | None = None,
    rows_from: list[int] | None = None,
) -> None:
    """Check a collective on x, if somebody asked for checks. Rows may differ where `rows_to` says how many go where."""
    if ACTIVE_CHECKERS:
        shape = list(x.shape if rows_to is None else x.shape[1:])
        ACTIVE_CHECKERS[0].check(what, axis, {"shape": shape, "dtype": str(x.dtype)}, rows_to, rows_from)


@contextmanager
def checked_collectives(store: dist.Store, rank: int, patience: float = 20.0):
    """Check every collective inside the block."""
    ACTIVE_CHECKERS.append(CollectiveChecker(store, rank, patience))
    try:
        yield
    finally:
        ACTIVE_CHECKERS.pop()
