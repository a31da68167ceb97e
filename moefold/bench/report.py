"""Reports of the benchmarks: JSON, or a table printed by the subject."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.box import HEAVY_HEAD, Box
from rich.table import Table

Row = dict[str, Any]  # one result
Report = dict[str, Any]  # facts of the machine, and `results`, a list of rows
ReportPrinter = Callable[[Report], None]


def show_report(report: Report, as_json: bool, print_table: ReportPrinter) -> int:
    if as_json:
        text = json.dumps(report, indent=1)
        print(text)
    else:
        print_table(report)
    return 0


def tell_progress(text: str) -> None:
    """A line for who waits, beside what is written to standard output."""
    print(text, file=sys.stderr, flush=True)


def report_heading(report: Report) -> str:
    """Title of a table: card, date and versions."""
    versions = report["versions"].items()
    known = [f"{name} {number}" for name, number in versions if number]
    installed = ", ".join(known)
    return f"{report['card']}, {report['date']}, {installed}"


def report_table(title: str, *columns: str, caption: str | None = None, box: Box = HEAVY_HEAD) -> Table:
    table = Table(*columns, box=box)
    table.title = title
    table.title_justify = "left"
    table.caption = caption
    table.caption_justify = "left"
    return table


def add_number_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
