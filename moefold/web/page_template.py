"""Pages of one file: a template with style, script and data inserted, which loads nothing else."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

FileNames = Sequence[str]

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class RenderedPage:
    """A page: its whole text, and the two parts that a browser executes."""

    text: str
    style: str
    script: str


def render_page(template: str, styles: FileNames, scripts: FileNames, title: str, data: Any) -> RenderedPage:
    """The filled template. All texts are inserted in one pass, so that no inserted text is taken for a placeholder."""
    style = read_page_files(styles)
    script = read_page_files(scripts)
    texts = {
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": script_safe_json(data),
    }
    skeleton = read_page_files([template])
    text = PLACEHOLDER.sub(lambda place: texts[place[1]], skeleton)
    return RenderedPage(text, style, script)


def read_page_files(names: FileNames) -> str:
    folder = files("moefold.web") / "page"
    texts: list[str] = []
    for name in names:
        path = folder / name
        texts.append(path.read_text(encoding="utf-8"))
    return "\n".join(texts)


def script_safe_json(data: Any) -> str:
    """JSON for a script element: no text in it can end that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
