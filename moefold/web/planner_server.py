"""The planner as a page on this machine: a fixed list of routes, and the same planner that `moefold plan` asks.

    GET  /         the page
    POST /answer   a request of plan.answer  -> its answer, or 422 and the problems in sentences
    POST /legal    a request and `hold`      -> where sliders may stand, and the nearest legal layout

Only this machine is listened to, and only under its own name, so that no page from elsewhere can ask under another.
Questions are JSON in a body, which a browser does not let foreign pages send. A search runs in a process of its own:
sliders stay quick, and a search that nobody waits for is ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import sys
import webbrowser
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moefold.config.errors import UserError, printable_text
from moefold.layout.spawn import check_port_is_free
from moefold.web.page_template import RenderedPage, render_page
from moefold.web.planner_page import planner_page_data
from moefold.web.planner_questions import Reply, ask_legal_layouts, ask_needs_search, ask_plan_answer

LOOPBACK = "127.0.0.1"
MAX_QUESTION_BYTES = 16_384  # bytes of a question
MAX_CONCURRENT = 2  # searches, and answers being worked out
PLANNER_STYLES = ("page.css", "planner.css")
PLANNER_SCRIPTS = ("marks.js", "explore.js", "charts.js", "controls.js", "planner.js")


def serve_planner(port: int, browser: bool) -> None:
    """Serve until interrupted."""
    listening = socket.create_server((LOOPBACK, check_port_is_free(port)))
    address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
    print(f"the planner is at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    config = uvicorn.Config(planner_app(), log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


def planner_app() -> Starlette:
    made = render_page("planner.html", PLANNER_STYLES, PLANNER_SCRIPTS, "moefold planner", planner_page_data())
    questions = PlannerEndpoints()

    async def show_page(request: Request) -> Response:
        return HTMLResponse(made.text)

    return Starlette(
        routes=[
            Route("/", show_page, methods=["GET"]),
            Route("/answer", questions.post_answer, methods=["POST"]),
            Route("/legal", questions.legal, methods=["POST"]),
        ],
        middleware=[
            Middleware(HeadersMiddleware, headers=security_headers(made)),
            Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False),
        ],
    )


def security_headers(made: RenderedPage) -> dict[str, str]:
    """Nothing runs in the page but its own code, and it talks to nobody but this server."""
    policy = {
        "default-src": "'none'",
        "script-src": csp_digest(made.script),
        "style-src": csp_digest(made.style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def csp_digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class HeadersMiddleware:
    """Lays the same headers on every response."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]):
        self.app = app
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self.headers]
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class PlannerEndpoints:
    """Answers the page, a few questions at a time."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(MAX_CONCURRENT)
        self.searching = 0

    async def legal(self, request: Request) -> Response:
        return await respond_json(request, self.wait_turn(request, ask_legal_layouts))

    async def post_answer(self, request: Request) -> Response:
        async def answer_or_search(raw: dict[str, Any]) -> Reply:
            status, kind = await run_in_threadpool(ask_needs_search, raw)
            if status != 200:
                return status, kind
            return await (
                self.search(request, raw) if kind["search"] else self.wait_turn(request, ask_plan_answer)(raw)
            )

        return await respond_json(request, answer_or_search)

    def wait_turn(
        self, request: Request, ask: Callable[[dict[str, Any]], Reply]
    ) -> Callable[[dict[str, Any]], Awaitable[Reply]]:
        async def reply_in_turn(raw: dict[str, Any]) -> Reply:
            async with self.turns:
                if await request.is_disconnected():  # while it waited, the slider moved on
                    return 499, {}
                return await run_in_threadpool(ask, raw)

        return reply_in_turn

    async def search(self, request: Request, raw: dict[str, Any]) -> Reply:
        if self.searching >= MAX_CONCURRENT:
            return 429, {"problems": [f"{self.searching} searches are running; wait for one to end, or cancel it"]}
        self.searching += 1
        try:
            return await search_in_subprocess(request, raw)
        finally:
            self.searching -= 1


async def search_in_subprocess(request: Request, raw: dict[str, Any]) -> Reply:
    """Search in a process of its own, which ends with the connection that asked."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moefold.web.planner_questions"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the server alone, which ends it
    )
    work = asyncio.create_task(process.communicate(json.dumps(raw).encode()))
    gone = asyncio.create_task(wait_for_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return 499, {}
        output, _ = work.result()
        if process.returncode:
            return 500, {"problems": ["the search failed; the terminal of moefold web tells why"]}
        status, found = json.loads(output)
        return status, found
    except asyncio.CancelledError:
        return 503, {"problems": ["moefold web is ending"]}  # nothing waits for this task: it may end as an answer
    finally:
        gone.cancel()
        if process.returncode is None:
            process.kill()


async def wait_for_disconnect(request: Request) -> None:
    """Returns when the one who asked has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def respond_json(request: Request, reply: Callable[[dict[str, Any]], Awaitable[Reply]]) -> Response:
    try:
        raw = await read_question(request)
    except UserError as refused:
        return JSONResponse({"problems": list(refused.problems)}, 400)
    status, found = await reply(raw)
    return JSONResponse(found, status)


async def read_question(request: Request) -> dict[str, Any]:
    """The body as keys with plain values, or a refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise UserError(f'a question of type "{printable_text(kind)}"; expected application/json')
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_QUESTION_BYTES:
            raise UserError(
                f"a question of more than {MAX_QUESTION_BYTES} bytes; expected a few keys, such as model and gpus"
            )
    try:
        raw = json.loads(body, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        raise UserError('the question is no JSON; expected keys and values, such as {"model": "tiny"}') from None
    if not isinstance(raw, dict) or not all(isinstance(v, str | int | float | None) for v in raw.values()):
        raise UserError('the question is no list of keys with plain values; expected such as {"model": "tiny"}')
    return raw
