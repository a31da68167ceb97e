"""Nested mappings (YAML) and dotted overrides (command line) become a Config, and back.

Both go through `with_values`: a flat {"parallel.ep": raw} laid over a base configuration. All problems of one
reading are collected and refused together, each naming the key, the value and a legal one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import ConfigKey, format_value, iterate_keys
from moefold.config.renamed_keys import report_renamed_keys, with_new_names
from moefold.config.run import Config

BOOLEAN_WORDS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def convert_value(key: ConfigKey, raw: Any) -> Any:
    """The raw value as the key's type, or ValueError. Text is read as a person would mean it; nothing is truncated."""
    if isinstance(raw, str) and key.type in (int, float):
        raw = float(raw) if key.type is float else int(raw.replace("_", ""))
    if key.type is bool:
        value = BOOLEAN_WORDS.get(raw.lower()) if isinstance(raw, str) else raw
        return value if isinstance(value, bool) else raise_value_error()
    if key.type is int:
        return (
            raw
            if isinstance(raw, int) and not isinstance(raw, bool) and key.bounds.contains_number(raw)
            else raise_value_error()
        )
    if key.type is float:
        number = float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else math.nan
        return number if math.isfinite(number) and key.bounds.contains_number(number) else raise_value_error()
    if key.choices:
        return raw if raw in key.choices else raise_value_error()
    if key.type is str:
        return raw if isinstance(raw, str) else raise_value_error()
    if not isinstance(raw, str | list | tuple):
        return raise_value_error()
    texts: list[Any] = [t.strip() for t in raw.split(",") if t.strip()] if isinstance(raw, str) else list(raw)  # pyright: ignore[reportUnknownArgumentType]
    return tuple(texts) if all(isinstance(t, str) for t in texts) else raise_value_error()


def raise_value_error() -> Any:
    raise ValueError


def with_values(base: Config, values: Mapping[str, Any], problems: dict[str, str]) -> Config:
    """`base` with the given keys set; what cannot be set stays as it was and is told in `problems`, by key."""
    known = {key.path: key for key in iterate_keys(base)}
    values, renamed = with_new_names(values)
    report_renamed_keys(renamed)
    good: dict[str, Any] = {}
    for path, raw in values.items():
        key = known.get(path)
        if key is None:
            problems[path] = unknown_key_message(path, known)
            continue
        try:
            good[path] = convert_value(key, raw)
        except (ValueError, TypeError, OverflowError):
            problems[path] = f"{path} = {printable_value(raw)} is not legal; expected {key.expected_values}"
    return cast(Config, replace_values(base, good, ""))


def unknown_key_message(path: str, known: Mapping[str, ConfigKey]) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    inside = [k for k in known if k.startswith(path + ".")]
    if inside:
        return f"{path} is a section, not a key; its keys are {', '.join(inside)}"
    by_end = {k.split(".")[-1]: k for k in known}
    ends = difflib.get_close_matches(path.split(".")[-1], by_end, n=1, cutoff=0.6)
    guess = did_you_mean(path, known) or (f' (did you mean "{by_end[ends[0]]}"?)' if ends else "")
    return f'no key "{printable_value(path)}"{guess}; `moefold train --help` lists all of them, such as parallel.ep'


def printable_value(raw: Any) -> str:
    """A value as it may be shown: short, and with nothing that would act on a terminal."""
    try:
        text = format_value(raw) if isinstance(raw, (bool, int, float, str, tuple)) else repr(raw)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError:  # Python does not print whole numbers of thousands of digits
        text = "a number of thousands of digits"
    return printable_text(text)


def replace_values(node: Any, good: Mapping[str, Any], prefix: str) -> Any:
    changes: dict[str, Any] = {}
    for name, value in cast(dict[str, Any], vars(node)).items():
        path = prefix + name
        if is_dataclass(value):
            changes[name] = replace_values(value, good, path + ".")
        elif path in good:
            changes[name] = good[path]
    return replace(node, **changes)


def flatten_sections(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty section says nothing."""
    flat: dict[str, Any] = {}
    if depth > 20:  # deeper than any configuration: an alias that contains itself
        raise UserError(
            f"{printable_value(prefix)} contains itself; expected sections of keys, such as\ntrain:\n  steps: 20"
        )
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(flatten_sections(cast(Mapping[Any, Any], value), path + ".", depth + 1))
        elif value is not None:
            flat[path] = value
    return flat


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """`--parallel.ep 4 --train.steps=20` -> {"parallel.ep": "4", "train.steps": "20"}."""
    values: dict[str, str] = {}
    waiting: str | None = None
    for word in words:
        if waiting is not None:
            values[waiting], waiting = word, None
        elif word.startswith("--") and "=" in word:
            name, _, value = word[2:].partition("=")
            values[name] = value
        elif word.startswith("--") and len(word) > 2:
            waiting = word[2:]
        else:
            raise UserError(
                f'cannot read "{printable_value(word)}"; expected --section.key value, such as --train.steps 20'
            )
    if waiting is not None:
        raise UserError(f"--{printable_value(waiting)} has no value; expected --{printable_value(waiting)} VALUE")
    return values


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; anything else is refused with the place."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path}; expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; expected a YAML configuration in UTF-8") from None
    except Exception as error:  # its constructors raise whatever they stumble over
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}; expected keys, such as\ntrain:\n  steps: 20")
    return cast(dict[str, Any], tree)


def config_as_yaml(config: Config) -> str:
    """The whole configuration as YAML that `moefold train FILE` reads back to an equal one."""
    plain = {k: plain_yaml_value(v) for k, v in asdict(config).items()}
    return yaml.safe_dump(plain, sort_keys=False)


def plain_yaml_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain_yaml_value(v) for k, v in cast(dict[str, Any], value).items()}
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
