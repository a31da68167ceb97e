"""Reading of nested mappings (YAML) and dotted overrides (command line) into a Config, and writing of a Config.

Both are applied by `with_values`: a flat {"parallel.ep": raw} over a base configuration. All problems of one reading
are collected and refused together, each with the key, the value and a legal one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.extensions import read_entry_points
from moefold.config.keys import ConfigKey, format_value, iterate_keys
from moefold.config.renamed_keys import keys_given_twice, report_renamed_keys, with_new_names
from moefold.config.run import Config

BOOLEAN_WORDS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
DEEPEST_SECTION = 20  # no configuration is deeper: beyond it, a YAML alias contains itself
LONGEST_YAML = 1_000_000  # characters
MOST_YAML_NODES = 10_000
Values = Mapping[str, Any]  # by path of the key
KnownKeys = Mapping[str, ConfigKey]


def convert_value(key: ConfigKey, raw: Any) -> Any:
    """The raw value as the key's type, or ValueError. Text is parsed; numbers are not truncated."""
    if key.choices:
        return require_legal(raw in key.choices, raw)
    convert = CONVERTERS.get(key.type, convert_text_list)
    return convert(raw, key)


def convert_boolean(raw: Any, key: ConfigKey) -> bool:
    value = raw
    if isinstance(raw, str):
        value = BOOLEAN_WORDS.get(raw.lower())
    return require_legal(isinstance(value, bool), value)


def convert_whole_number(raw: Any, key: ConfigKey) -> int:
    number = raw
    if isinstance(raw, str):
        number = int(raw.replace("_", ""))
    require_legal(isinstance(number, int), raw)
    require_legal(not isinstance(number, bool), raw)
    return require_legal(key.bounds.contains_number(number), number)


def convert_number(raw: Any, key: ConfigKey) -> float:
    require_legal(isinstance(raw, int | float | str), raw)
    require_legal(not isinstance(raw, bool), raw)
    number = float(raw)
    require_legal(math.isfinite(number), number)
    return require_legal(key.bounds.contains_number(number), number)


def convert_text(raw: Any, key: ConfigKey) -> str:
    return require_legal(isinstance(raw, str), raw)


def convert_text_list(raw: Any, key: ConfigKey) -> tuple[str, ...]:
    """A list of texts, or one text with commas between them."""
    if isinstance(raw, str):
        parts = map(str.strip, raw.split(","))
        return tuple(filter(None, parts))
    require_legal(isinstance(raw, list | tuple), raw)
    for text in raw:
        require_legal(isinstance(text, str), text)
    return tuple(raw)


Converter = Callable[[Any, ConfigKey], Any]
CONVERTERS: dict[Any, Converter] = {
    bool: convert_boolean,
    int: convert_whole_number,
    float: convert_number,
    str: convert_text,
}


def require_legal(legal: bool, value: Any) -> Any:
    if not legal:
        raise ValueError
    return value


def with_values(base: Config, values: Values, problems: dict[str, str]) -> Config:
    """`base` with the given keys set. A key that cannot be set keeps its value and gets a line in `problems`."""
    read_entry_points()
    known = {key.path: key for key in iterate_keys(base)}
    problems.update(keys_given_twice(values))
    values, renamed = with_new_names(values)
    report_renamed_keys(renamed)
    legal: dict[str, Any] = {}
    for path, raw in values.items():
        key = known.get(path)
        if key is None:
            problems[path] = unknown_key_message(path, known)
            continue
        try:
            legal[path] = convert_value(key, raw)
        except (ValueError, TypeError, OverflowError):
            problems[path] = illegal_value_message(key, raw)
    if legal.get("data.files") and "data.source" not in values:
        legal["data.source"] = "files"  # naming files implies it
    replaced = replace_values(base, legal, "")
    return cast(Config, replaced)


def illegal_value_message(key: ConfigKey, raw: Any) -> str:
    guess = ""
    if key.names is not None and isinstance(raw, str):
        guess = did_you_mean(raw, key.names)
    return f"{key.path} = {printable_value(raw)} is not legal{guess}; expected {key.expected_values}"


def unknown_key_message(path: str, known: KnownKeys) -> str:
    """The message for an unknown key, with the nearest known one."""
    prefix = path + "."
    inside = [name for name in known if name.startswith(prefix)]
    if inside:
        return f"{path} is a section, not a key; its keys are {', '.join(inside)}"
    guess = did_you_mean(path, known) or guess_by_last_word(path, known)
    return f'no key "{printable_value(path)}"{guess}; `moefold train --help all` lists all of them, such as parallel.ep'


def guess_by_last_word(path: str, known: KnownKeys) -> str:
    """The key whose last word is nearest to the path's: `topk` -> `model.moe.top_k`."""
    by_last_word: dict[str, str] = {}
    for name in known:
        last = name.split(".")[-1]
        by_last_word[last] = name
    last_word = path.split(".")[-1]
    near = difflib.get_close_matches(last_word, by_last_word, n=1, cutoff=0.6)
    if not near:
        return ""
    return f' (did you mean "{by_last_word[near[0]]}"?)'


def printable_value(raw: Any) -> str:
    """A value as shown in messages: short, without control characters."""
    plain = isinstance(raw, (bool, int, float, str, tuple))
    try:
        text = format_value(raw) if plain else repr(raw)
    except ValueError:  # Python does not print whole numbers of thousands of digits
        text = "a number of thousands of digits"
    return printable_text(text)


def replace_values(node: Any, values: Values, prefix: str) -> Any:
    fields = cast(dict[str, Any], vars(node))
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        path = prefix + name
        if is_dataclass(value):
            changes[name] = replace_values(value, values, f"{path}.")
        elif path in values:
            changes[name] = values[path]
    return replace(node, **changes)


def flatten_sections(tree: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Empty sections and null values are left out."""
    flat: dict[str, Any] = {}
    if depth > DEEPEST_SECTION:
        where = printable_value(prefix)
        raise UserError(f"{where} contains itself; expected sections of keys, such as\ntrain:\n  steps: 20")
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inner = cast(Mapping[Any, Any], value)
            deeper = flatten_sections(inner, f"{path}.", depth + 1)
            flat.update(deeper)
        elif value is not None:
            flat[path] = value
    return flat


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """`--parallel.ep 4 --train.steps=20` -> {"parallel.ep": "4", "train.steps": "20"}."""
    values: dict[str, str] = {}
    waiting: str | None = None  # the name that the next word is the value of
    for word in words:
        if waiting is not None:
            values[waiting] = word
            waiting = None
            continue
        if not word.startswith("--") or word == "--":
            raise UserError(
                f'cannot read "{printable_value(word)}"; expected --section.key value, such as --train.steps 20'
            )
        assignment = word.removeprefix("--")
        name, equals, value = assignment.partition("=")
        if equals:
            values[name] = value
        else:
            waiting = name
    if waiting is not None:
        name = printable_value(waiting)
        raise UserError(f"--{name} has no value; expected --{name} VALUE")
    return values


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; anything else is refused with the file's path."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_YAML + 1)
        tree = parse_yaml(text)
    except UserError as refused:
        raise UserError(f"{path} {refused}") from None
    except FileNotFoundError:
        raise UserError(f"no file {path}; expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; expected a YAML configuration in UTF-8") from None
    except Exception as error:  # YAML constructors raise exceptions of any type
        words = str(error).split()
        reason = " ".join(words)[:300]
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}; expected keys, such as\ntrain:\n  steps: 20")
    return cast(dict[str, Any], tree)


def parse_yaml(text: str) -> Any:
    """The values of a YAML text. A text that is too long, or that aliases would make so, is refused before any value is
    made of it."""
    if len(text) > LONGEST_YAML:
        raise UserError(f"has more than {LONGEST_YAML} characters; expected a configuration of some hundred lines")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if count_yaml_nodes(node, {}) > MOST_YAML_NODES:
            raise UserError(f"has aliases that make more than {MOST_YAML_NODES} values; write the keys themselves")
        return loader.construct_document(node)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]


def count_yaml_nodes(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """The values that a node stands for, those behind aliases counted each time. A node inside itself counts as too
    many."""
    if node in counted:
        return counted[node]
    counted[node] = MOST_YAML_NODES + 1  # while its own values are counted
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            children += pair
    count = 1
    for child in children:
        count += count_yaml_nodes(child, counted)
    counted[node] = count
    return count


def config_as_yaml(config: Config) -> str:
    """The whole configuration as YAML that `moefold train FILE` reads back to an equal one."""
    plain = plain_yaml_value(asdict(config))
    return yaml.safe_dump(plain, sort_keys=False)


def plain_yaml_value(value: Any) -> Any:
    if isinstance(value, dict):
        inner = cast(dict[str, Any], value)
        plain: dict[str, Any] = {}
        for name, each in inner.items():
            plain[name] = plain_yaml_value(each)
        return plain
    if isinstance(value, tuple):
        return list(cast(tuple[Any, ...], value))
    return value
