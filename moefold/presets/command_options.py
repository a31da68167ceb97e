"""A command's own options are a dataclass, read by tyro; every other `--section.key value` is a configuration key."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import tyro

from moefold.config.errors import UserError, printable_text
from moefold.config.keys import format_value, iterate_keys
from moefold.presets.zoo import PRESETS

T = TypeVar("T")


def split_overrides(options: type[Any], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are the command's own, and those that override the configuration."""
    own = {"help", *(name for f in fields(options) for name in option_spellings(f.name))}
    switches = {f"--{key.path}" for key in iterate_keys(PRESETS["tiny"]()) if key.type is bool}
    mine: list[str] = []
    overrides: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("--") or word[2:].partition("=")[0] in own:
            mine.append(word)
            continue
        overrides.append(word)
        if word in switches and (not words or words[0].startswith("--")):  # said without a value
            overrides.append("true")
        elif "=" not in word and words:
            overrides.append(words.popleft())
    return mine, overrides


def check_rank_count(count: int) -> int:
    if not 1 <= count <= 1_000_000:
        raise UserError(f"--nproc {count} is not legal; expected a whole number at least 1, such as 4")
    return count


def option_spellings(name: str) -> tuple[str, ...]:
    dashed = name.replace("_", "-")
    return name, dashed, f"no-{dashed}"


def read_options(options: type[T], argv: Sequence[str], command: str, config_keys: bool = True) -> tuple[T, list[str]]:
    """The command's options and the overrides. `--help` prints both, then leaves."""
    mine, overrides = split_overrides(options, argv) if config_keys else (list(argv), [])
    refuse_misspelt_option(options, overrides)
    asks_help = "--help" in mine or "-h" in mine
    try:
        return tyro.cli(options, args=mine, prog=f"moefold {command}"), overrides
    except SystemExit as leaving:
        if asks_help and leaving.code == 0 and config_keys:
            print(list_config_keys())
        raise


def refuse_misspelt_option(options: type[Any], overrides: Sequence[str]) -> None:
    """An override that is no configuration key but looks like one of the command's own options."""
    own = [f.name.replace("_", "-") for f in fields(options)]
    keys = {key.path for key in iterate_keys(PRESETS["tiny"]())}
    for word in overrides:
        name = word[2:].partition("=")[0]
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
        if word.startswith("--") and "." not in name and name not in keys and near:
            raise UserError(f'no option "--{printable_text(name)}" (did you mean "--{near[0]}"?)')


def list_config_keys() -> str:
    """Every configuration key with its default in the preset `tiny` and its meaning."""
    lines = ["", "configuration keys, set as --section.key VALUE (defaults of the preset tiny):", ""]
    for key in iterate_keys(PRESETS["tiny"]()):
        choices = f" [{', '.join(key.choices)}]" if key.choices else ""
        lines.append(f"  --{key.path} {format_value(key.default)}{choices}\n      {key.doc}")
    return "\n".join(lines)
