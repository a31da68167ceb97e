"""One HTML file that shows how runs went. It holds its own style, code and data, and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moefold.config.errors import UserError
from moefold.web.page_template import render_page
from moefold.web.run_summary import require_run_folder, summarize_run

MAX_RUNS = 8  # lines in one plot whose colours can be told apart
REPORT_SCRIPTS = ("marks.js", "curves.js", "heat.js", "page.js")


def render_report(folders: Sequence[Path]) -> str:
    """The page of one run, or of several beside each other."""
    if len(folders) > MAX_RUNS:
        raise UserError(f"{len(folders)} runs are too many to tell apart in one plot; expected at most {MAX_RUNS}")
    for folder in folders:
        require_run_folder(folder)
    places = [folder.resolve() for folder in folders]
    again = [str(folder) for i, folder in enumerate(folders) if places[i] in places[:i]]
    if again:
        raise UserError(f"{again[0]} is given twice; expected different runs: leave one out")
    labels = distinct_labels(places)
    runs = [summarize_run(folder, label, len(folders)) for folder, label in zip(folders, labels, strict=True)]
    title = " and ".join(run["label"] for run in runs)
    return render_page("page.html", ["page.css"], REPORT_SCRIPTS, title, {"runs": runs}).text


def distinct_labels(places: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    count = 1
    while len({place.parts[-count:] for place in places}) < len(places):
        count += 1
    return ["/".join(place.parts[-count:]) for place in places]
