"""The planner as a page on this machine: a fixed list of routes to the planner of `moefold plan`.

    GET  /         the page
    POST /answer   a request of plan.answer  -> its answer, or 422 and the problems in sentences
    POST /legal    a request and `hold`      -> legal values of the sliders, and the nearest legal layout
    POST /model    `config_json`, a text     -> the nearest preset, and the keys in which the model differs

The server listens on this machine only, and only under its own host name, against DNS rebinding. Questions are JSON in
a body, which a browser does not let foreign pages send. They are answered in processes of their own, which are killed
when the page disconnects or their time is up (question_processes.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from moefold.config.errors import UserError, printable_text
from moefold.web.local_server import local_app, serve_app
from moefold.web.page_template import render_page
from moefold.web.planner_page import planner_page_data
from moefold.web.planner_questions import JsonObject, Reply, ask_needs_search
from moefold.web.question_processes import QuestionProcesses

AsyncReply = Callable[[JsonObject], Awaitable[Reply]]

MAX_QUESTION_BYTES = 16_384
MAX_CONCURRENT = 2  # searches, and other answers, at the same time
CLIENT_LEFT = 499
ANSWER_SECONDS = 60.0  # that one layout may take, or the legal values of the sliders
SEARCH_SECONDS = 600.0
PLANNER_STYLES = ("page.css", "planner.css")
PLANNER_SCRIPTS = ("marks.js", "explore.js", "charts.js", "controls.js", "planner.js", "compare.js", "start.js")


def serve_planner(port: int, browser: bool) -> None:
    """Serve until interrupted."""
    serve_app(planner_app(), "the planner", port, browser)


def planner_app() -> Starlette:
    data = planner_page_data()
    page = render_page("planner.html", PLANNER_STYLES, PLANNER_SCRIPTS, "moefold planner", data)
    endpoints = PlannerEndpoints()

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page.text)

    routes = [
        Route("/", show_page, methods=["GET"]),
        Route("/answer", endpoints.post_answer, methods=["POST"]),
        Route("/legal", endpoints.post_legal, methods=["POST"]),
        Route("/model", endpoints.post_model, methods=["POST"]),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await endpoints.processes.end()

    return local_app(routes, page, lifespan)


class PlannerEndpoints:
    """The routes of the page; a few questions are answered at a time."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_CONCURRENT)
        self.processes = QuestionProcesses()
        self.searching = 0

    async def post_legal(self, request: Request) -> Response:
        async def find_legal_layouts(raw: JsonObject) -> Reply:
            return await self.answer_in_slot(request, "legal", raw)

        return await respond_json(request, find_legal_layouts)

    async def post_model(self, request: Request) -> Response:
        async def find_own_model(raw: JsonObject) -> Reply:
            return await self.answer_in_slot(request, "model", raw)

        return await respond_json(request, find_own_model)

    async def post_answer(self, request: Request) -> Response:
        async def answer_or_search(raw: JsonObject) -> Reply:
            status, body = await run_in_threadpool(ask_needs_search, raw)
            if status != 200:
                return status, body
            if body["search"]:
                return await self.search_layouts(request, raw)
            return await self.answer_in_slot(request, "answer", raw)

        return await respond_json(request, answer_or_search)

    async def answer_in_slot(self, request: Request, kind: str, raw: JsonObject) -> Reply:
        async with self.slots:
            if await request.is_disconnected():  # the slider moved on while the question waited
                return CLIENT_LEFT, {}
            return await self.processes.ask(request, kind, raw, ANSWER_SECONDS)

    async def search_layouts(self, request: Request, raw: JsonObject) -> Reply:
        if self.searching >= MAX_CONCURRENT:
            problem = f"{self.searching} searches are running; wait for one to end, or cancel it"
            return 429, {"problems": [problem]}
        self.searching += 1
        try:
            return await self.processes.ask(request, "answer", raw, SEARCH_SECONDS)
        finally:
            self.searching -= 1


async def respond_json(request: Request, reply: AsyncReply) -> Response:
    try:
        raw = await read_question(request)
    except UserError as refused:
        problems = list(refused.problems)
        return JSONResponse({"problems": problems}, 400)
    except ClientDisconnect:  # before the whole question was there
        return JSONResponse({}, CLIENT_LEFT)
    status, body = await reply(raw)
    return JSONResponse(body, status)


async def read_question(request: Request) -> JsonObject:
    """The body of a question as keys with plain values, or a refusal."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip()
    if kind != "application/json":
        raise UserError(f'a question of type "{printable_text(kind)}"; expected application/json')
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_QUESTION_BYTES:
            expected = "expected a few keys, such as model and gpus"
            raise UserError(f"a question of more than {MAX_QUESTION_BYTES} bytes; {expected}")
    try:
        raw = json.loads(body, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        raise UserError('the question is no JSON; expected keys and values, such as {"model": "tiny"}') from None
    if not is_plain_mapping(raw):
        raise UserError('the question is no list of keys with plain values; expected such as {"model": "tiny"}')
    return raw


def is_plain_mapping(raw: Any) -> bool:
    if not isinstance(raw, dict):
        return False
    values = cast(JsonObject, raw).values()
    return all(map(is_plain_value, values))


def is_plain_value(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
