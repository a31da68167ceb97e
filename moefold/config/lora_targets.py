"""Targets of adapters as text: `*.attention.*`, `*.moe.experts.*: rank=8 alpha=32` or `blocks.0.*: none`.

The pattern is a shell pattern over names of products. For each product the last matching entry applies; missing options
are those of the section `lora`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moefold.config.entry_lists import parse_each_entry
from moefold.config.errors import did_you_mean
from moefold.config.keys import NumberBounds

OPTIONS = {"rank": "a whole number from 1 to 4096", "alpha": "a number above 0"}
LEGAL_RANKS = NumberBounds(at_least=1, at_most=4096)
LEGAL_ALPHAS = NumberBounds(above=0, at_most=1e9)


@dataclass(frozen=True)
class LoraTarget:
    """Products that match a pattern. None: as in the section `lora`. `excluded`: they have no adapter."""

    pattern: str
    rank: int | None = None
    alpha: float | None = None
    excluded: bool = False

    def matches(self, product: str) -> bool:
        return fnmatchcase(product, self.pattern)


def parse_targets(entries: Iterable[str]) -> list[LoraTarget]:
    """The targets of `lora.targets`, in order; all entries that cannot be read are refused at once."""
    return parse_each_entry("lora.targets", entries, parse_target)


def parse_target(entry: str) -> LoraTarget:
    pattern, _, text = entry.partition(":")
    pattern = pattern.strip()
    if not pattern:
        raise ValueError("expected a pattern, such as *.attention.*")
    if text.strip() == "none":
        return LoraTarget(pattern, excluded=True)
    values: dict[str, str] = {}
    for option in text.split():
        name, _, value = option.partition("=")
        if name not in OPTIONS:
            near = did_you_mean(name, OPTIONS)
            raise ValueError(f'no option "{name}"{near}; there are: rank, alpha, or none alone')
        values[name] = value
    rank = read_option(values, "rank", LEGAL_RANKS)
    alpha = read_option(values, "alpha", LEGAL_ALPHAS)
    if rank is not None and rank != int(rank):
        raise ValueError(f"expected rank = {OPTIONS['rank']}")
    return LoraTarget(pattern, None if rank is None else int(rank), alpha)


def read_option(values: dict[str, str], name: str, legal: NumberBounds) -> float | None:
    if name not in values:
        return None
    try:
        value = float(values[name])
    except ValueError:
        value = float("nan")
    if not legal.contains_number(value):
        raise ValueError(f"expected {name} = {OPTIONS[name]}")
    return value
