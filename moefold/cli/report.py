"""`moefold report`: the metrics of one run or several, as one self-contained HTML file. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from moefold.config.errors import UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class ReportOptions:
    """Write one self-contained HTML file about a run: loss, speed, and heat-maps of expert load. Several runs share the
    same plots."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs, as `moefold train` names them."""
    out: Path | None = None
    """The file to write; by default report.html (of several runs comparison.html) in the first run's folder."""


FORM = CommandForm("report", ReportOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    if not options.runs:
        raise UserError("no run is given; expected the folder of at least one, such as moefold report runs/tiny")
    from moefold.web.report import render_report  # numpy, from here on

    page = render_report(options.runs)
    out = options.out or default_report_path(options.runs)
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; expected a file, such as --out {out / 'report.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out} ({len(page) / 1e6:.1f} MB); open it in a browser")
    return 0


def default_report_path(runs: Sequence[Path]) -> Path:
    name = "report.html" if len(runs) == 1 else "comparison.html"
    return runs[0] / name
