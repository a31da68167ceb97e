"""`moefold doctor hang RUN`: the newest report of a hang: who was named, where all ranks stood, their stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.printable import escape_character
from moefold.watch.hang_report import HangReport, read_newest_report


@dataclass(frozen=True)
class HangOptions:
    """Show the newest report of a hang: the ranks that were named, where every rank stood, Python stacks of the ranks
    that answered."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    rank: int | None = None
    """Show the stacks of this rank alone."""


FORM = CommandForm("doctor hang", HangOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    report = read_newest_report(options.run)
    for line in report_lines(report, options.rank):
        print("".join(map(escape_character, line)))
    return 0


def report_lines(report: HangReport, only: int | None) -> list[str]:
    lines = [f"{report.when}:"]
    lines += report.summary().split("\n")
    for state in report.ranks:
        if only not in (None, state.rank) or not state.stacks:
            continue
        lines += ["", f"stacks of rank {state.rank} (process {state.pid} on {state.host}), {state.seconds:g} s there:"]
        lines += state.stacks.strip().split("\n")
    return lines
