"""Runs as a page that follows them, on this machine; nothing is written.

GET /        the page, with all that is known
GET /news    what is new since `told`, a list of ToldSteps as JSON, one for each run
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from moefold.config.errors import UserError
from moefold.web.local_server import local_app, serve_app
from moefold.web.page_template import RenderedPage, render_page
from moefold.web.report import REPORT_SCRIPTS, REPORT_STYLES
from moefold.web.run_folder import describe_absent_run, require_run_or_future_run
from moefold.web.run_list import refuse_repeated_folders, refuse_too_many_runs
from moefold.web.run_summary import ToldSteps
from moefold.web.watched_runs import WatchedRuns

WATCH_SCRIPTS = (*REPORT_SCRIPTS, "live.js")
MAX_TOLD_LETTERS = 2000


def serve_watch(folders: Sequence[Path], port: int, browser: bool) -> None:
    """Serve until interrupted."""
    refuse_too_many_runs(folders)
    for folder in folders:
        require_run_or_future_run(folder)
    refuse_repeated_folders(folders)
    for folder in folders:
        if not folder.exists():
            print(describe_absent_run(folder))
    serve_app(watch_app(folders), "the watch", port, browser)


def watch_app(folders: Sequence[Path]) -> Starlette:
    watched = WatchedRuns(folders)

    def render_watch() -> RenderedPage:
        runs = watched.news([ToldSteps()] * len(folders))
        data = {"name": "moefold watch", "runs": runs}
        return render_page("watch.html", REPORT_STYLES, WATCH_SCRIPTS, " and ".join(watched.labels), data)

    async def show_page(request: Request) -> Response:
        page = await run_in_threadpool(render_watch)
        return HTMLResponse(page.text)

    async def tell_news(request: Request) -> Response:
        try:
            told = read_told(request.query_params.get("told", ""), len(folders))
        except UserError as refused:
            return JSONResponse({"problems": list(refused.problems)}, 400)
        runs = await run_in_threadpool(watched.news, told)
        return JSONResponse({"runs": runs})

    routes = [Route("/", show_page, methods=["GET"]), Route("/news", tell_news, methods=["GET"])]
    return local_app(routes, render_watch())


def read_told(text: str, runs: int) -> list[ToldSteps]:
    """What a page says it was told, or a refusal."""
    try:
        told = json.loads(text[:MAX_TOLD_LETTERS])
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, list) or not all(map(is_told_steps, cast(list[Any], told))):
        raise UserError("`told` is no list of numbers by run; expected what the last answer said: load the page again")
    by_run = cast(list[list[int]], told)
    if len(by_run) != runs:
        raise UserError(f"the page shows {len(by_run)} runs, and {runs} are watched; load the page again")
    return [ToldSteps(*steps) for steps in by_run]


def is_told_steps(steps: Any) -> bool:
    if not isinstance(steps, list):
        return False
    numbers: list[Any] = steps
    return len(numbers) == len(ToldSteps._fields) and all(isinstance(number, int) for number in numbers)
