"""The report of runs as one HTML file, with style, script and data inside; it loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moefold.config.errors import UserError
from moefold.web.page_numbers import JsonObject
from moefold.web.page_template import render_page
from moefold.web.run_summary import require_run_folder, summarize_run

MAX_RUNS = 8  # curves in one plot whose colours can be told apart
REPORT_STYLES = ("page.css",)
REPORT_SCRIPTS = ("marks.js", "curves.js", "heat.js", "fp8.js", "page.js")


def render_report(folders: Sequence[Path]) -> str:
    """The page of one run, or of several side by side."""
    if len(folders) > MAX_RUNS:
        raise UserError(f"{len(folders)} runs are too many to tell apart in one plot; expected at most {MAX_RUNS}")
    for folder in folders:
        require_run_folder(folder)
    refuse_repeated_folders(folders)
    labels = distinct_labels([folder.resolve() for folder in folders])
    runs: list[JsonObject] = []
    for folder, label in zip(folders, labels, strict=True):
        runs.append(summarize_run(folder, label, len(folders)))
    title = " and ".join(run["label"] for run in runs)
    data = {"runs": runs}
    page = render_page("page.html", REPORT_STYLES, REPORT_SCRIPTS, title, data)
    return page.text


def refuse_repeated_folders(folders: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        path = folder.resolve()
        if path in seen:
            raise UserError(f"{folder} is given twice; expected different runs: leave one out")
        seen.add(path)


def distinct_labels(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    count = 1
    labels = last_parts(paths, count)
    while len(set(labels)) < len(paths):
        count += 1
        labels = last_parts(paths, count)
    return labels


def last_parts(paths: Sequence[Path], count: int) -> list[str]:
    labels: list[str] = []
    for path in paths:
        parts = path.parts[-count:]
        labels.append("/".join(parts))
    return labels
