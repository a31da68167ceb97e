"""Orders of faults (`observe.fault`): damage done to a run on purpose, on one rank at one step, to see it found.

    nan weight=blocks.1.moe.experts.down expert=2 rank=1 step=3      a weight in memory
    nan mean=blocks.0.attention.query rank=0 step=3                  optimizer state: mean, mean_square, ...
    nan gradient=head.norm.weight rank=0 step=3                      a gradient, before it is summed over ranks
    inf output=attend layer=1 rank=0 step=3                          what a step of the model gives to the next
    flip weight=embedding.weight bit=12 rank=2 step=3                one bit of a weight
    slow times=9 rank=1 step=3                                       a rank that takes 9 times as long, from there on
    clock seconds=-86400 rank=1 step=3                               a clock that jumps, once

With `at=FILE` in place of a step the fault comes at the step whose number that file of the run's folder has, while
there is such a file: so a fault can be ordered while the run runs. Without `expert` the first element is damaged that
the rank holds. A restarted run does it again; with `once` it does not, if `restarts.jsonl` of the run's folder has a
restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moefold.printable import printable_text

VALUES = ("nan", "inf", "flip")
TIME_FAULTS = {"slow": "times", "clock": "seconds"}  # with the number that each needs
NUMBERS = ("expert", "layer", "rank", "step", "bit", *TIME_FAULTS.values())
STATE_KINDS = ("mean", "mean_square", "momentum", "main")
PLACES = ("weight", "gradient", "output", *STATE_KINDS)
LONGEST_NUMBER = 9  # digits


class FaultOrder(NamedTuple):
    """`place`: a kind of tensor (PLACES); `name`: of the parameter, or of the step of the model. Both are empty for a
    fault of time."""

    value: str
    place: str = ""
    name: str = ""
    rank: int = 0
    step: int = 1
    expert: int | None = None
    layer: int | None = None
    bit: int = 0
    times: int = 0
    seconds: int = 0
    at: str = ""
    once: bool = False

    def is_due(self, rank: int, step: int, out: Path) -> bool:
        if rank != self.rank:
            return False
        if self.at:
            return step == step_in_file(out / self.at)
        return step >= self.step if self.value == "slow" else step == self.step


def step_in_file(path: Path) -> int | None:
    """The step whose number a file has; None without a file, and for one that is being written."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if is_number(text, is_signed=False) else None


def parse_fault(text: str) -> FaultOrder:
    """The fault of a value of `observe.fault`; ValueError where it is none."""
    value, *words = text.split() or [""]
    known_values = (*VALUES, *TIME_FAULTS)
    if value not in known_values:
        raise ValueError(f"begins with none of {', '.join(known_values)}")
    places: list[tuple[str, str]] = []
    numbers: dict[str, int] = {}
    once = "once" in words
    at = ""
    for word in words:
        name, _, said = word.partition("=")
        if name in PLACES and said:
            places.append((name, said))
        elif name == "at" and is_file_name(said):
            at = said
        elif name in NUMBERS and is_number(said, name == "seconds"):
            numbers[name] = int(said)
        elif word != "once":
            known = ", ".join((*PLACES, *NUMBERS, "at"))
            raise ValueError(f"has {printable_text(word)}, which gives none of {known}")
    if value in TIME_FAULTS:
        return time_fault(value, places, numbers)._replace(at=at, once=once)
    if len(places) != 1:
        raise ValueError(f"names {len(places)} of {', '.join(PLACES)} instead of one")
    place, name = places[0]
    if value == "flip" and place != "weight":
        raise ValueError(f"flips a bit of {place}; bits are flipped in a weight")
    return FaultOrder(value, place, name, at=at, once=once, **numbers)


def is_file_name(said: str) -> bool:
    return bool(said) and "/" not in said and said not in (".", "..")


def is_number(said: str, is_signed: bool) -> bool:
    digits = said.removeprefix("-") if is_signed else said
    return digits.isdecimal() and digits.isascii() and len(digits) <= LONGEST_NUMBER


def time_fault(value: str, places: list[tuple[str, str]], numbers: dict[str, int]) -> FaultOrder:
    needed = TIME_FAULTS[value]
    if places:
        raise ValueError(f"has {printable_text(places[0][0])}, which a fault of time does not damage")
    if needed not in numbers:
        raise ValueError(f"says no {needed}=, such as {needed}=9")
    return FaultOrder(value)._replace(**numbers)


def fault_problem(text: str) -> str | None:
    """Why a value of `observe.fault` is none; None for a legal one."""
    if not text:
        return None
    try:
        parse_fault(text)
    except ValueError as problem:
        return str(problem)
    return None
