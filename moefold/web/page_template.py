"""A page is one file: its template with style, code and data laid in, which asks nobody for anything to be drawn."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class RenderedPage:
    """The whole text, and the two parts of it that a browser acts on."""

    text: str
    style: str
    script: str


def render_page(template: str, styles: Sequence[str], scripts: Sequence[str], title: str, data: Any) -> RenderedPage:
    """Everything is laid in in one pass, so that nothing inserted is read as a place to insert."""
    style, script = read_page_files(styles), read_page_files(scripts)
    texts = {"title": html.escape(title), "style": style, "script": script, "data": script_safe_json(data)}
    return RenderedPage(
        re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], read_page_files([template])), style, script
    )


def read_page_files(names: Sequence[str]) -> str:
    folder = files("moefold.web") / "page"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def script_safe_json(data: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
