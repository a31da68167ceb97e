"""The report of runs as one HTML file, with style, script and data inside; it loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moefold.web.page_numbers import JsonObject
from moefold.web.page_template import render_page
from moefold.web.run_folder import require_run_folder
from moefold.web.run_list import distinct_labels, refuse_repeated_folders, refuse_too_many_runs
from moefold.web.run_summary import summarize_run

REPORT_STYLES = ("page.css",)
REPORT_SCRIPTS = ("marks.js", "view.js", "curves.js", "heat.js", "fp8.js", "page.js")


def render_report(folders: Sequence[Path]) -> str:
    """The page of one run, or of several side by side."""
    refuse_too_many_runs(folders)
    for folder in folders:
        require_run_folder(folder)
    refuse_repeated_folders(folders)
    labels = distinct_labels(folders)
    runs: list[JsonObject] = []
    for folder, label in zip(folders, labels, strict=True):
        summary = summarize_run(folder, label, len(folders))
        runs.append(summary)
    title = " and ".join(run["label"] for run in runs)
    data = {"name": "moefold report", "runs": runs}
    page = render_page("page.html", REPORT_STYLES, REPORT_SCRIPTS, title, data)
    return page.text
