"""Options of a command: its own options, a dataclass read by tyro, and configuration keys, `--section.key value`."""

from __future__ import annotations

import difflib
import os
import sys
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import tyro

from moefold.config.errors import UserError, printable_text
from moefold.config.keys import ConfigKey, format_value, iterate_keys
from moefold.presets.zoo import PRESETS

T = TypeVar("T")

LARGEST_RANK_COUNT = 1_000_000


def split_overrides(options: type[Any], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of the command's own options, and words that override the configuration."""
    own = {"help"}
    for option in fields(options):
        own.update(option_spellings(option.name))
    switches = boolean_switches()
    mine: list[str] = []
    overrides: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("--") or option_name(word) in own:
            mine.append(word)
            continue
        overrides.append(word)
        # A boolean key may be given without a value; any other key takes the next word.
        if word in switches and (not words or words[0].startswith("--")):
            overrides.append("true")
        elif "=" not in word and words:
            overrides.append(words.popleft())
    return mine, overrides


def option_name(word: str) -> str:
    """`--train.steps=20` -> `train.steps`."""
    name, _, _ = word[2:].partition("=")
    return name


def boolean_switches() -> set[str]:
    keys = iterate_keys(PRESETS["tiny"]())
    return {f"--{key.path}" for key in keys if key.type is bool}


def check_rank_count(count: int) -> int:
    if not 1 <= count <= LARGEST_RANK_COUNT:
        raise UserError(f"--nproc {count} is not legal; expected a whole number at least 1, such as 4")
    return count


def option_spellings(name: str) -> tuple[str, ...]:
    dashed = name.replace("_", "-")
    return name, dashed, f"no-{dashed}"


def read_options(options: type[T], argv: Sequence[str], command: str, config_keys: bool = True) -> tuple[T, list[str]]:
    """The command's options and the overrides. `--help` prints both and exits."""
    mine, overrides = list(argv), []
    if config_keys:
        mine, overrides = split_overrides(options, argv)
    refuse_misspelt_option(options, overrides)
    asks_help = "--help" in mine or "-h" in mine
    with exit_when_output_is_closed():
        try:
            return tyro.cli(options, args=mine, prog=f"moefold {command}"), overrides
        except SystemExit as leaving:
            if asks_help and leaving.code == 0:
                if config_keys:
                    print(list_config_keys())
                sys.stdout.flush()
            raise


@contextmanager
def exit_when_output_is_closed() -> Generator[None]:
    """Exit with code 0 where standard output is a pipe whose reader has ended, as in `moefold train --help | head`."""
    try:
        yield
    except BrokenPipeError:
        # The interpreter flushes standard output again at its end: what is left goes to the null device.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        raise SystemExit(0) from None


def refuse_misspelt_option(options: type[Any], overrides: Sequence[str]) -> None:
    """Refuse an override that is not a configuration key but is close to one of the command's own options."""
    own = [option.name.replace("_", "-") for option in fields(options)]
    keys = {key.path for key in iterate_keys(PRESETS["tiny"]())}
    for word in overrides:
        name = option_name(word)
        if not word.startswith("--") or "." in name or name in keys:
            continue
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
        if near:
            raise UserError(f'no option "--{printable_text(name)}" (did you mean "--{near[0]}"?)')


def list_config_keys() -> str:
    """Every configuration key with its default in the preset `tiny` and its meaning."""
    lines = ["", "configuration keys, set as --section.key VALUE (defaults of the preset tiny):", ""]
    for key in iterate_keys(PRESETS["tiny"]()):
        lines += describe_config_key(key)
    return "\n".join(lines)


def describe_config_key(key: ConfigKey) -> list[str]:
    """Lines of --help: the key with its default and legal names, its meaning, and one line for each open name."""
    choices = f" [{', '.join(key.choices)}]" if key.choices else ""
    lines = [f"  --{key.path} {format_value(key.default)}{choices}", f"      {key.doc}"]
    for name in key.names or ():
        lines.append(f"        {name}: {key.names.says(name)}")  # pyright: ignore[reportOptionalMemberAccess]
    return lines
