"""How a configuration key is declared: its default, one sentence for people, and the values it may take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class NumberBounds:
    """The legal range of a number; `above` excludes its end, the others include it."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def contains_number(self, value: float) -> bool:
        return self.above < value < self.below and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        parts = [f"at least {self.at_least:g}"] if self.at_least > -math.inf else []
        parts += [f"above {self.above:g}"] if self.above > -math.inf else []
        parts += [f"at most {self.at_most:g}"] if self.at_most < math.inf else []
        parts += [f"below {self.below:g}"] if self.below < math.inf else []
        return " and ".join(parts)


def key(default: T, doc: str, **bounds: float) -> T:
    """A key with its default, what it means, and its bounds (`at_least=1`, `above=0`, ...). Whole numbers without an
    upper bound of their own get one beyond all sense, so that arithmetic on them stays quick."""
    if type(default) is int:
        bounds.setdefault("at_most", 1e9)
    return field(default=default, metadata={"doc": doc, "bounds": NumberBounds(**bounds)})


def section(make: type[T]) -> T:
    """A nested group of keys, all at their defaults."""
    return field(default_factory=make)


@dataclass(frozen=True)
class ConfigKey:
    """One leaf of the configuration, found by walking the dataclasses."""

    path: str
    type: Any
    default: Any
    doc: str
    bounds: NumberBounds

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def expected_values(self) -> str:
        """The legal values, in words, ending with one that certainly works."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(
            self.type, "a list of texts, as a,b,c"
        )
        bounds = f" {self.bounds}" if str(self.bounds) else ""
        return f"{kind}{bounds}, such as {format_value(self.default)}"


def format_value(value: Any) -> str:
    """A value as it would be written in YAML or on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(v) for v in value) or '""'  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value) if value != "" else '""'


def iterate_keys(instance: Any, prefix: str = "") -> Iterator[ConfigKey]:
    """Every leaf key below a configuration object, with its present value as the default."""
    hints = cached_type_hints(type(instance))  # pyright: ignore[reportUnknownArgumentType]
    for each in fields(instance):
        value, path = getattr(instance, each.name), prefix + each.name
        if is_dataclass(value):
            yield from iterate_keys(value, path + ".")
        else:
            yield ConfigKey(path, hints[each.name], value, each.metadata["doc"], each.metadata["bounds"])


@cache  # annotations are texts until they are evaluated, which takes longer than all the rest
def cached_type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
