"""Pages as a person gets them: `moefold web` or `moefold watch` in its own process, and questions over a socket."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def served(*words: str) -> Iterator[str]:
    """`host:port` of a running server (`moefold web`, or another command), which ends well when it is interrupted."""
    command = [sys.executable, "-m", "moefold", *(words or ("web",)), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        lines = iter(server.stdout.readline, "")
        told = next(filter(None, (re.search(r"http://(127\.0\.0\.1:\d+)/", line) for line in lines)), None)
        assert told, server.communicate(timeout=30)[1]
        yield told[1]
        server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=60)
        assert server.returncode == 0, complaints
        assert "Traceback" not in complaints, complaints
    finally:
        server.kill()


def send(
    place: str, method: str, path: str, body: str | bytes = "", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(place, timeout=120)
    connection.request(method, path, body or None, dict(headers or {}))
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return found


def ask(place: str, path: str, question: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = send(place, "POST", path, json.dumps(question), {"Content-Type": "application/json"})
    return status, json.loads(body)
