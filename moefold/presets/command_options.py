"""Options of a command: its own options, a dataclass read by tyro, and configuration keys, `--section.key value` or
`section.key=value`."""

from __future__ import annotations

import difflib
import io
import re
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import tyro

from moefold.config.errors import UserError, printable_text
from moefold.config.keys import TYPES_IN_WORDS, iterate_keys
from moefold.config.read import parse_overrides
from moefold.presets.command_form import CommandForm
from moefold.presets.command_help import help_text
from moefold.presets.declared_options import declared_options
from moefold.presets.zoo import PRESETS
from moefold.printable import escape_character

T = TypeVar("T")

LARGEST_RANK_COUNT = 1_000_000
HELP_WORDS = ("--help", "-h")
KEY_AND_VALUE = re.compile(r"[A-Za-z_][\w.]*=")


def split_overrides(options: type[Any], argv: Sequence[str], section: str = "") -> tuple[list[str], list[str]]:
    """Words of the command's own options, and words that override the configuration. `section`: where keys of one
    section alone are taken, `name=value` of other names is a word of its own, such as a prompt."""
    own = {"help"}
    for option in fields(options):
        own.update(option_spellings(option.name))
    declared = declared_options(options)
    take_values = {option.flag for option in declared if not option.is_switch}
    switches = boolean_switches()
    mine: list[str] = []
    overrides: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        if KEY_AND_VALUE.match(word) and word.startswith(section):
            word = f"--{word}"
        if not word.startswith("--") or option_name(word) in own:
            mine.append(word)
            # The value of an option is no key, though it may read like one: --out lr=1
            if word.replace("_", "-") in take_values and words and not words[0].startswith("--"):
                mine.append(words.popleft())
            continue
        overrides.append(word)
        # A boolean key may be given without a value; any other key takes the next word.
        if word in switches and (not words or words[0].startswith("--") or KEY_AND_VALUE.match(words[0])):
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


def read_options(form: CommandForm[T], argv: Sequence[str]) -> tuple[T, list[str]]:
    """The command's options and the overrides. `--help` prints the command's help and exits."""
    mine, overrides = list(argv), []
    if form.config_keys:
        mine, overrides = split_overrides(form.options, argv, form.section)
    for position, word in enumerate(mine):
        if word in HELP_WORDS:
            following = mine[position + 1 :]
            topics = [topic for topic in following if not topic.startswith("-")]
            print(help_text(form, *topics[:1]), flush=True)
            raise SystemExit(0)
    refuse_misspelt_option(form.options, overrides)
    refuse_other_sections(form, overrides)
    refuse_illegal_numbers(form.options, mine)
    return parse_own_options(form, mine), overrides


def refuse_other_sections(form: CommandForm[Any], overrides: Sequence[str]) -> None:
    """Refuse keys of other sections, where those of one alone are taken."""
    if not form.section:
        return
    given = parse_overrides(overrides)
    for path in given:
        if "." in path and not form.takes_key(path):
            raise UserError(
                f"{form.name} takes keys of the section {form.section} alone, not {printable_text(path)}; "
                f"`moefold {form.name} --help {form.section}` lists them"
            )


def parse_own_options(form: CommandForm[T], words: Sequence[str]) -> T:
    """The options, read by tyro, which repeats words as they are: where some hold control characters, its message is
    printed with these escaped."""
    parse = partial(tyro.cli, form.options, args=words, prog=f"moefold {form.name}")
    if all(word.isprintable() for word in words):
        return parse()
    message = io.StringIO()
    try:
        with redirect_stdout(message), redirect_stderr(message):
            return parse()
    except SystemExit:
        for line in message.getvalue().split("\n"):
            print("".join(map(escape_character, line)), file=sys.stderr)
        raise


def refuse_illegal_numbers(options: type[Any], words: Sequence[str]) -> None:
    """Refuse a value that is no number where an option takes one; tyro's message would name Python's types."""
    numbers: dict[str, Any] = {}
    for option in declared_options(options):
        if option.type.base in (int, float):
            numbers[option.flag] = option.type.base
    for word, following in pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        kind = numbers.get(flag)
        if kind is None or value.startswith("--"):  # another option, or a value that is missing: tyro says so
            continue
        try:
            kind(value)
        except ValueError:
            wanted = f"expected {TYPES_IN_WORDS[kind]}, such as {flag} 4"
            raise UserError(f"{flag} {printable_text(value)} is not legal; {wanted}") from None


def refuse_misspelt_option(options: type[Any], overrides: Sequence[str]) -> None:
    """Refuse an override that is not a configuration key but is close to one of the command's own options."""
    own = [option.name.replace("_", "-") for option in fields(options)]
    tiny = PRESETS["tiny"]()
    keys = {key.path for key in iterate_keys(tiny)}
    for word in overrides:
        name = option_name(word)
        if not word.startswith("--") or "." in name or name in keys:
            continue
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
        if near:
            raise UserError(f'no option "--{printable_text(name)}" (did you mean "--{near[0]}"?)')
