"""Servers of pages to this machine only: under its own host name, against DNS rebinding, with a strict policy."""

from __future__ import annotations

import hashlib
import socket
import webbrowser
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moefold.layout.spawn import check_port_is_free
from moefold.web.page_template import RenderedPage

LOOPBACK = "127.0.0.1"


def serve_app(app: Starlette, name: str, port: int, browser: bool) -> None:
    """Serve until interrupted."""
    free_port = check_port_is_free(port)
    listening = socket.create_server((LOOPBACK, free_port))
    _, bound_port = listening.getsockname()
    address = f"http://{LOOPBACK}:{bound_port}/"
    print(f"{name} is at {address} (Ctrl-C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def local_app(routes: Sequence[Route], page: RenderedPage, lifespan: Any = None) -> Starlette:
    """An application that answers this machine alone, with the policy of its one page."""
    allowed_hosts = [LOOPBACK, "localhost"]
    middleware = [
        Middleware(HeadersMiddleware, headers=security_headers(page)),
        Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts, www_redirect=False),
    ]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


def security_headers(page: RenderedPage) -> dict[str, str]:
    """The Content-Security-Policy: only the page's own script runs, and it connects to this server only."""
    policy = {
        "default-src": "'none'",
        "script-src": csp_digest(page.script),
        "style-src": csp_digest(page.style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    directives = [f"{name} {value}" for name, value in policy.items()]
    return {
        "Content-Security-Policy": "; ".join(directives),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def csp_digest(text: str) -> str:
    raw = text.encode()
    digest = hashlib.sha256(raw).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


class HeadersMiddleware:
    """Adds the same headers to every response."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]):
        self.app = app
        self.headers: list[tuple[bytes, bytes]] = []
        for name, value in headers.items():
            raw_name = name.lower().encode()
            raw_value = value.encode()
            self.headers.append((raw_name, raw_value))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = message["headers"]
                message["headers"] = [*own, *self.headers]
            await send(message)

        if scope["type"] == "http":
            await self.app(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send)
