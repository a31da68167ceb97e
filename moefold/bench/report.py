"""Reports of the benchmarks: JSON, or a table printed by the subject."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]  # one result
Report = dict[str, Any]  # facts of the machine, and `results`, a list of rows


def show_report(report: Report, as_json: bool, print_table: Callable[[Report], None]) -> int:
    if as_json:
        text = json.dumps(report, indent=1)
        print(text)
    else:
        print_table(report)
    return 0


def report_heading(report: Report) -> str:
    """Title of a table: card, date and versions."""
    versions = report["versions"].items()
    installed = [f"{name} {number}" for name, number in versions if number]
    return f"{report['card']}, {report['date']}, {', '.join(installed)}"


def add_number_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
