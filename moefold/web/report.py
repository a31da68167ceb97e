"""One HTML file that shows how runs went. It holds its own style, code and data, and asks nobody for anything."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moefold.config.refused import Refused
from moefold.web.gather import gather, require_run

AT_MOST = 8  # lines in one plot whose colours can be told apart
SCRIPTS = ("marks.js", "curves.js", "heat.js", "page.js")


def report(folders: Sequence[Path]) -> str:
    """The page of one run, or of several beside each other."""
    if len(folders) > AT_MOST:
        raise Refused(f"{len(folders)} runs are too many to tell apart in one plot; expected at most {AT_MOST}")
    for folder in folders:
        require_run(folder)
    places = [folder.resolve() for folder in folders]
    again = [str(folder) for i, folder in enumerate(folders) if places[i] in places[:i]]
    if again:
        raise Refused(f"{again[0]} is given twice; expected different runs: leave one out")
    labels = labels_of(places)
    return page([gather(folder, label, len(folders)) for folder, label in zip(folders, labels, strict=True)])


def labels_of(places: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    count = 1
    while len({place.parts[-count:] for place in places}) < len(places):
        count += 1
    return ["/".join(place.parts[-count:]) for place in places]


def page(runs: list[dict[str, Any]]) -> str:
    """The template with everything laid in, in one pass, so that nothing inserted is read as a place to insert."""
    parts = files("moefold.web") / "page"
    texts = {
        "title": html.escape(" and ".join(run["label"] for run in runs)),
        "style": (parts / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((parts / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": embedded({"runs": runs}),
    }
    template = (parts / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: texts[place[1]], template)


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
