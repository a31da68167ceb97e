"""One HTML file that shows how runs went. It holds its own style, code and data, and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moefold.config.refused import Refused
from moefold.web.gather import gather, require_run
from moefold.web.template import page

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
    runs = [gather(folder, label, len(folders)) for folder, label in zip(folders, labels, strict=True)]
    title = " and ".join(run["label"] for run in runs)
    return page("page.html", ["page.css"], SCRIPTS, title, {"runs": runs}).text


def labels_of(places: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    count = 1
    while len({place.parts[-count:] for place in places}) < len(places):
        count += 1
    return ["/".join(place.parts[-count:]) for place in places]
