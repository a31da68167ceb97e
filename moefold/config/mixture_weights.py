"""Weights of the sources of a mixture, as text: `0.7/0.3`, or `0.7/0.3,1000:0.5/0.5` with other weights from a step on.

An entry has one weight for each folder of `data.files`, in their order; only their ratio counts. The first entry has no
step: it holds from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from moefold.config.errors import UserError, printable_text

ENTRY = re.compile(r"(?:(\d{1,9}):)?([0-9.eE+-]+(?:/[0-9.eE+-]+)*)")
EXAMPLE = "expected weights such as 0.7/0.3, or 1000:0.7/0.3 from a step on"


class WeightPhase(NamedTuple):
    """Weights that hold from a step on; they sum to one."""

    step: int
    weights: tuple[Fraction, ...]


def parse_weights(entries: Iterable[str], sources: int) -> list[WeightPhase]:
    """The phases of `data.weights` for so many sources; entries that cannot be read are refused."""
    phases: list[WeightPhase] = []
    for entry in entries:
        try:
            phases.append(parse_phase(entry, phases, sources))
        except ValueError as error:
            raise UserError(f"data.weights = {printable_text(entry)}: {error}") from None
    return phases


def parse_phase(entry: str, before: list[WeightPhase], sources: int) -> WeightPhase:
    found = ENTRY.fullmatch(entry.strip())
    if found is None:
        raise ValueError(EXAMPLE)
    step_text, weights_text = found.groups()
    step = int(step_text or 0)
    if not before and step:
        raise ValueError("the first weights hold from the beginning; expected them without a step, such as 0.7/0.3")
    if before and step <= before[-1].step:
        raise ValueError(f"expected a step above {before[-1].step}, such as {before[-1].step + 1000}:0.5/0.5")
    weights = [read_weight(text) for text in weights_text.split("/")]
    if len(weights) != sources:
        raise ValueError(f"{len(weights)} weights for {sources} folders in data.files; expected one for each")
    total = sum(weights)
    if total == 0:
        raise ValueError("all weights are 0; expected one above 0")
    return WeightPhase(step, tuple(weight / total for weight in weights))


def read_weight(text: str) -> Fraction:
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(EXAMPLE) from None
    if not 0 <= weight <= 10**9 or weight.denominator > 10**12:
        raise ValueError("expected weights from 0 to 1e9 with at most 12 decimals")
    return weight


def weight_problems(entries: Iterable[str], sources: int) -> str:
    """The problem of the entries as text; empty if all can be read."""
    try:
        parse_weights(entries, sources)
    except UserError as error:
        return "; ".join(error.problems)
    return ""
