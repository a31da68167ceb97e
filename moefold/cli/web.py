"""`moefold web`: the planner's page with sliders, served on this machine. Needs no torch, but the extra `web`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefold.cli.web_extra import web_packages
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class WebOptions:
    """Serve the planner's page to this machine only: choose model, cluster and layout, see memory and time."""

    port: int = 8765
    """Port on 127.0.0.1; 0 takes any free port."""
    browser: bool = True
    """Open the page in a browser."""


FORM = CommandForm("web", WebOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    with web_packages("web"):
        from moefold.web.planner_server import serve_planner
    try:
        serve_planner(options.port, options.browser)
    except KeyboardInterrupt:
        print("ended")
    return 0
