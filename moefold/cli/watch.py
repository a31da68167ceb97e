"""`moefold watch`: the report of runs as a page that follows them, on this machine. Needs no torch, but extra `web`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from moefold.cli.web_extra import web_packages
from moefold.config.errors import UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class WatchOptions:
    """Serve the report of runs to this machine only, and follow them while they go on. Nothing is written."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs; a run may start later."""
    port: int = 8766
    """Port on 127.0.0.1; 0 takes any free port."""
    browser: bool = True
    """Open the page in a browser."""


FORM = CommandForm("watch", WatchOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    if not options.runs:
        raise UserError("no run is given; expected the folder of at least one, such as moefold watch runs/tiny")
    with web_packages("watch"):
        from moefold.web.watch_server import serve_watch
    try:
        serve_watch(options.runs, options.port, options.browser)
    except KeyboardInterrupt:
        print("ended")
    return 0
