"""The page of all configuration keys, docs/configuration.md, made from the keys themselves.

python -m tests.support.configuration_page docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from moefold.config.keys import LARGEST_WHOLE_NUMBER, ConfigKey, format_value, iterate_keys
from moefold.presets.zoo import PRESETS

OPENING = """# Configuration keys

Made by `python -m tests.support.configuration_page docs/configuration.md`; a test compares. Defaults are those of the
preset `tiny`; `moefold presets` lists the others, and a run writes all its keys into `config.yaml`. A key is set as
`--train.steps 20` or `train.steps=20`, in a YAML file by its section. `moefold train --help optim` prints a section.
Rules between keys, and what to change, are told when they are broken.
"""
UNSAID_LIMIT = f"at most {LARGEST_WHOLE_NUMBER:g}"  # of whole numbers that have no other
TYPE_NAMES = {bool: "true, false", int: "whole number", float: "number", str: "text"}


def section_of(key: ConfigKey) -> str:
    return key.path.rpartition(".")[0]


def legal_values(key: ConfigKey) -> str:
    if key.choices:
        return ", ".join(f"`{name}`" for name in key.choices)
    kind = TYPE_NAMES.get(key.type, "list of texts")
    limits = [limit for limit in str(key.bounds).split(" and ") if limit != UNSAID_LIMIT]
    return f"{kind} {' and '.join(limits)}".strip()


def key_row(key: ConfigKey) -> str:
    meaning = key.doc
    for name in key.names or ():
        meaning += f"; `{name}`: {key.names.says(name)}"  # pyright: ignore[reportOptionalMemberAccess]
    cells = [f"`{key.path}`", f"`{format_value(key.default)}`", legal_values(key), meaning]
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def page_lines() -> Iterator[str]:
    yield OPENING
    keys = list(iterate_keys(PRESETS["tiny"]()))
    for section, members in groupby(keys, section_of):
        yield f"## {section or 'the run'}\n"
        yield "| key | default | values | meaning |\n|---|---|---|---|"
        yield from map(key_row, members)
        yield ""


def configuration_page() -> str:
    return "\n".join(page_lines())


def main(path: str) -> None:
    Path(path).write_text(configuration_page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
