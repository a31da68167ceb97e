"""Declaration of a configuration key: its default, one sentence for --help, and its legal values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from moefold.config.open_names import OpenNames

T = TypeVar("T")

LARGEST_WHOLE_NUMBER = 1e9
TYPES_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class NumberBounds:
    """The legal range of a number; `above` and `below` exclude their end, the others include it."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def contains_number(self, value: float) -> bool:
        inside = self.above < value < self.below
        return inside and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        limits = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        finite = [f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit)]
        return " and ".join(finite)


def key(default: T, doc: str, names: OpenNames | None = None, **bounds: float) -> T:
    """A key with its default, its meaning, and its bounds (`at_least=1`, `above=0`, ...) or its open set of names.
    Whole numbers without an upper bound are limited to 1e9, so that the arithmetic of rules stays small."""
    if type(default) is int:
        bounds.setdefault("at_most", LARGEST_WHOLE_NUMBER)
    limits = NumberBounds(**bounds)
    metadata = {"doc": doc, "bounds": limits, "names": names}
    return field(default=default, metadata=metadata)


def section(make: type[T]) -> T:
    """A nested group of keys, all at their defaults."""
    return field(default_factory=make)


@dataclass(frozen=True)
class ConfigKey:
    """One leaf of the configuration tree."""

    path: str
    type: Any
    default: Any
    doc: str
    bounds: NumberBounds
    names: OpenNames | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal names, where the key takes one of several: a closed set (Literal) or an open one."""
        if self.names is not None:
            return tuple(self.names)
        if get_origin(self.type) is Literal:
            return get_args(self.type)
        return ()

    @property
    def expected_values(self) -> str:
        """The legal values in words, ending with one that certainly works."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = TYPES_IN_WORDS.get(self.type, "a list of texts, as a,b,c")
        bounds = f" {self.bounds}" if str(self.bounds) else ""
        example = format_value(self.default)
        return f"{kind}{bounds}, such as {example}"


def format_value(value: Any) -> str:
    """A value as it would be written in YAML or on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value) if value != "" else '""'


def iterate_keys(instance: Any, prefix: str = "") -> Iterator[ConfigKey]:
    """Every leaf key below a configuration object, with its present value as the default."""
    hints = cached_type_hints(type(instance))  # pyright: ignore[reportUnknownArgumentType]
    for declared in fields(instance):
        path = prefix + declared.name
        value = getattr(instance, declared.name)
        if is_dataclass(value):
            yield from iterate_keys(value, path + ".")
            continue
        about = declared.metadata
        hint = hints[declared.name]
        yield ConfigKey(path, hint, value, about["doc"], about["bounds"], about["names"])


@cache  # evaluating the annotations, which are texts, takes longer than all the rest
def cached_type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
