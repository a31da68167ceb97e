"""Parameter groups of the optimizer, as text: `*.router.weight: lr=0.5 decay=0 betas=0.9,0.99 eps=1e-8 rule=adamw`,
or `embedding.*: frozen`.

The pattern is a shell pattern over full parameter names. For each name the first matching entry applies; missing
options are those of the section `optim`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import NoReturn

from moefold.config.entry_lists import parse_each_entry, problems_of_entries
from moefold.config.errors import UserError, did_you_mean
from moefold.config.extensions import read_entry_points
from moefold.config.open_names import OPTIMIZER_NAMES

NEAREST_NAMES = 3  # shown for a pattern that matches nothing


@dataclass(frozen=True)
class OptimizerGroup:
    """Options of the parameters that match a pattern. `lr` is a factor of the run's learning rate, `decay` the decay of
    matrices in the group; the first of `betas` is Muon's momentum. None: as in the section `optim`. Frozen parameters
    have neither gradient nor state."""

    pattern: str = "*"
    lr: float = 1.0
    decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    rule: str | None = None
    frozen: bool = False

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def first_match(groups: Iterable[OptimizerGroup], name: str) -> OptimizerGroup | None:
    """The first group whose pattern matches a parameter's name."""
    for group in groups:
        if group.matches(name):
            return group
    return None


def refuse_idle_groups(groups: list[OptimizerGroup], names: Collection[str]) -> None:
    """Refuse groups that match none of a model's parameters, and groups that freeze all of them."""
    problems: list[str] = []
    for group in groups:
        if not any(map(group.matches, names)):
            near = nearest_names(group.pattern, names)
            problems.append(f"optim.groups: {group.pattern} matches no parameter; the nearest are {near}")
    matches = [first_match(groups, name) for name in names]
    if all(group is not None and group.frozen for group in matches):
        problems.append("optim.groups freezes every parameter; expected at least one that is trained")
    if problems:
        raise UserError(*problems)


def refuse_matrix_rule(pattern: str, name: str, shape: tuple[int, ...]) -> NoReturn:
    """Refuse an entry that gives a norm or bias to a rule for matrices."""
    raise UserError(
        f"optim.groups: {pattern} gives {name} to a rule for matrices, but its shape is {shape} of a norm or bias; "
        "narrow the pattern, or put an entry before it"
    )


def without_numbers(name: str) -> str:
    """A parameter's name with a `*` for the number of its layer."""
    return re.sub(r"\d+", "*", name)


def nearest_names(pattern: str, names: Collection[str]) -> str:
    """The parameter names most like a pattern. Layers with the same parameters are named once."""
    first_of_each: dict[str, str] = {}
    for name in sorted(names):
        first_of_each.setdefault(without_numbers(name), name)
    wanted = pattern.replace("*", "")

    def likeness(name: str) -> float:
        matcher = SequenceMatcher(None, wanted, name)
        return matcher.ratio()

    near = sorted(first_of_each.values(), key=likeness, reverse=True)
    nearest = near[:NEAREST_NAMES]
    return ", ".join(nearest)


def parse_groups(entries: Iterable[str]) -> list[OptimizerGroup]:
    """The groups of `optim.groups`, in order; all entries that cannot be read are refused at once."""
    return parse_each_entry("optim.groups", join_split_entries(entries), parse_group)


def join_split_entries(entries: Iterable[str]) -> list[str]:
    """Entries as written: on the command line a list is split at commas, also at the comma of `betas`."""
    joined: list[str] = []
    for entry in entries:
        if ":" in entry or not joined:
            joined.append(entry)
        else:
            joined[-1] += f",{entry}"
    return joined


def parse_group(entry: str) -> OptimizerGroup:
    pattern, _, options = entry.partition(":")
    if not pattern.strip() or not options.strip():
        raise ValueError("expected a pattern, a colon and options, such as *.router.weight: lr=0.5 decay=0")
    values: dict[str, object] = {}
    for option in options.split():
        name, _, text = option.partition("=")
        values[name] = read_option(name, text)
    if values.get("frozen") and len(values) > 1:
        raise ValueError("a frozen parameter has no other options; expected frozen alone")
    return OptimizerGroup(pattern.strip(), **values)  # pyright: ignore[reportArgumentType]


def read_option(name: str, text: str) -> object:
    reader = OPTION_READERS.get(name)
    if reader is None:
        near = did_you_mean(name, OPTION_READERS)
        known = ", ".join(OPTION_READERS)
        raise ValueError(f'no option "{name}"{near}; there are: {known}')
    return reader(text)


def read_factor(text: str) -> float:
    return number_within(text, 0.0, 100.0, "lr = a factor from 0 to 100, such as 0.5")


def read_decay(text: str) -> float:
    return number_within(text, 0.0, 100.0, "decay = a number from 0 to 100, such as 0.1")


def read_eps(text: str) -> float:
    return number_within(text, 1e-300, 1.0, "eps = a number above 0 and at most 1, such as 1e-8")


def read_betas(text: str) -> tuple[float, float]:
    expected = "betas = two numbers from 0 to below 1, such as 0.9,0.95"
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"expected {expected}")
    below_one = 1 - 2**-53
    first, second = parts
    beta1 = number_within(first, 0.0, below_one, expected)
    beta2 = number_within(second, 0.0, below_one, expected)
    return beta1, beta2


def read_frozen(text: str) -> bool:
    if text not in ("", "true", "false"):
        raise ValueError("expected frozen, frozen=true or frozen=false")
    return text != "false"


def read_rule(text: str) -> str:
    read_entry_points()
    if text not in OPTIMIZER_NAMES:
        near = did_you_mean(text, OPTIMIZER_NAMES)
        known = ", ".join(OPTIMIZER_NAMES)
        raise ValueError(f'no rule "{text}"{near}; there are: {known}')
    return text


def number_within(text: str, least: float, most: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ValueError(f"expected {expected}")
    return value


OPTION_READERS: Mapping[str, Callable[[str], object]] = {
    "lr": read_factor,
    "decay": read_decay,
    "betas": read_betas,
    "eps": read_eps,
    "rule": read_rule,
    "frozen": read_frozen,
}


def group_problems(entries: Iterable[str]) -> str:
    """The problems of the entries as text; empty if all can be read."""
    return problems_of_entries(parse_groups, entries)
