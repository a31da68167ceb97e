"""Help of a command: one screen of options and sections; the keys of a section, or of all, where it is named."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import ConfigKey, format_value, iterate_keys
from moefold.presets.command_form import CommandForm
from moefold.presets.declared_options import DeclaredOption, declared_options, option_meanings
from moefold.presets.zoo import PRESETS

WIDEST_LINE = 100
MEANING_COLUMN = 24
ALL_SECTIONS = "all"


def help_text(form: CommandForm[Any], topic: str | None = None) -> str:
    """The screen of a command; with a topic, the keys of that section, or the screen and all keys."""
    if topic is None:
        return help_screen(form)
    if not form.config_keys:
        raise UserError(f"moefold {form.name} takes no configuration keys; expected moefold {form.name} --help alone")
    if topic == ALL_SECTIONS:
        return help_screen(form) + "\n" + list_config_keys()
    return list_config_keys(topic)


def help_screen(form: CommandForm[Any]) -> str:
    options = declared_options(form.options)
    meanings = option_meanings(form.options)
    summary = inspect.cleandoc(form.options.__doc__ or "")
    usage = usage_lines(form, options)
    lines = [*usage, "", *wrapped(summary), ""]
    for option in sorted(options, key=lambda option: not option.positional):
        meaning = option_meaning(option, meanings)
        lines += option_lines(option_heading(option), meaning)
    if form.config_keys:
        sections = form.section or "a section, or of all sections"
        lines += option_lines("--help [SECTION]", f"This text, or the keys of {sections}")
        lines += ["", *section_lines(form)]
    else:
        lines += option_lines("--help", "This text")
    return "\n".join(lines)


def usage_lines(form: CommandForm[Any], options: Sequence[DeclaredOption]) -> list[str]:
    """The usage in one line, or in two where one would be wider than a screen."""
    words = ["usage: moefold", form.name]
    for option in options:
        if option.positional:
            name = option_heading(option)
            words.append(name if option.required else f"[{name}]")
    first = " ".join(words)
    rest = "[OPTIONS] [KEY=VALUE ...]" if form.config_keys else "[OPTIONS]"
    whole = f"{first} {rest}"
    columns = shutil.get_terminal_size().columns
    return [whole] if len(whole) <= columns else [first, f"  {rest}"]


def option_heading(option: DeclaredOption) -> str:
    """`--out PATH`, `--json`, `RECIPE`, `{ls,verify,diff}`, `RUNS ...`."""
    value = option.value_word
    if option.positional:
        value = value if option.choices else option.name.upper()
    words = [value]
    if not option.positional:
        words = [option.flag, value]
    if option.type.several:
        words.append("...")
    return " ".join(word for word in words if word)


def option_meaning(option: DeclaredOption, meanings: dict[str, str]) -> str:
    """The option's meaning, with its default where that says something: not for an empty one, nor for a switch."""
    meaning = meanings.get(option.name, "").rstrip(".")
    if option.required or option.is_switch or not option.default:
        return meaning
    default = str(option.default)
    if isinstance(option.default, float):
        default = f"{option.default:g}"
    return f"{meaning} (default {default})"


def option_lines(heading: str, meaning: str) -> list[str]:
    """The heading, and the meaning beside it; below it where the heading is too long."""
    lines = wrapped(meaning, MEANING_COLUMN) or [""]
    start = f"  {heading}"
    if len(start) + 2 > MEANING_COLUMN:
        return [start, *lines] if meaning else [start]
    return [f"{start:<{MEANING_COLUMN}}{lines[0].lstrip()}".rstrip(), *lines[1:]]


def wrapped(text: str, indent: int = 0) -> list[str]:
    columns = shutil.get_terminal_size().columns
    space = " " * indent
    return textwrap.wrap(
        " ".join(text.split()),
        min(columns, WIDEST_LINE),
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
    )


# ---- configuration keys


def section_lines(form: CommandForm[Any]) -> list[str]:
    """The sections with the number of their keys, and how to set and to list keys."""
    inside = [key.path for key in tiny_keys() if "." in key.path and form.takes_key(key.path)]
    counts = Counter(path.partition(".")[0] for path in inside)
    counted = [f"{section} ({count})" for section, count in counts.items()]
    listed = ", ".join(counted)
    example = "--parallel.ep 4 or parallel.ep=4" if form.section else "--train.steps 20 or train.steps=20"
    return [
        f"Configuration keys by section, set as {example}:",
        *wrapped(listed, 2),
        f"moefold {form.name} --help {form.section or 'optim'} lists the keys of a section.",
    ]


def list_config_keys(section: str = ALL_SECTIONS) -> str:
    """The keys of a section, or all, each with its default in the preset `tiny` and its meaning."""
    keys = list(tiny_keys())
    if section != ALL_SECTIONS:
        keys = [key for key in keys if f"{key.path}.".startswith(f"{section}.")]
    if not keys:
        raise UserError(unknown_section_message(section))
    lines = ["", "configuration keys, set as --section.key VALUE (defaults of the preset tiny):", ""]
    for key in keys:
        lines += describe_config_key(key)
    return "\n".join(lines)


def unknown_section_message(section: str) -> str:
    known: dict[str, None] = {ALL_SECTIONS: None}
    for key in tiny_keys():
        parent = key.path
        while parent := parent.rpartition(".")[0]:
            known[parent] = None
    guess = did_you_mean(section, known)
    return f'no section "{printable_text(section)}"{guess}; there are: {", ".join(sorted(known))}'


def describe_config_key(key: ConfigKey) -> list[str]:
    """Lines of --help: the key with its default and legal names, its meaning, and one line for each open name."""
    choices = f" [{', '.join(key.choices)}]" if key.choices else ""
    lines = [f"  --{key.path} {format_value(key.default)}{choices}", f"      {key.doc}"]
    for name in key.names or ():
        lines.append(f"        {name}: {key.names.says(name)}")  # pyright: ignore[reportOptionalMemberAccess]
    return lines


def tiny_keys() -> list[ConfigKey]:
    return list(iterate_keys(PRESETS["tiny"]()))
