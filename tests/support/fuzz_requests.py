"""Odd requests to `moefold web`: each is answered or refused, the server goes on, and its memory stays bounded.

    python -m tests.support.fuzz_requests --cases 300

Printed: the seed, every case that failed, and the largest memory of the server. The exit code is the number of failed
cases, at most 100.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import resource
import socket
import sys
import time
from typing import Any

from tests.support.odd_bytes import ODD_JSON, changed_bytes
from tests.support.planner_page import served

QUESTION = {"model": "tiny", "gpus": "2", "gpu": "H100", "seq": 1024, "mbs": 1, "gbs": 8, "parallel.ep": 2}
KEYS = [*QUESTION, "precision", "recompute", "hold", "tokens", "best", "memory", "parallel.pp", "optim.lr", "", "\x1b"]
VALUES = [*ODD_JSON, "9" * 5000, "../../etc/passwd", "<script>", "nan", "qwen3-30b-a3b", 3, -0.5, "\x00", "'; --"]
METHODS = ["GET", "POST", "PUT", "OPTIONS", "PURGE"]
PATHS = ["/", "/answer", "/legal", "/answer/..", "/%00", "/../../etc/passwd", "/answer?x=" + "y" * 4000]
TYPES = ["application/json", "application/json; charset=\xff", "text/plain", "", "multipart/form-data"]
HOSTS = ["127.0.0.1", "localhost", "evil.example", ""]
SECONDS = 20.0  # that an answer may take; a question whose client leaves is ended


def odd_question(chance: random.Random) -> bytes:
    question: dict[str, Any] = dict(QUESTION)
    for _ in range(chance.randrange(1, 4)):
        question[chance.choice(KEYS)] = chance.choice(VALUES)
    raw = json.dumps(question).encode()
    return changed_bytes(raw, chance) if chance.random() < 0.3 else raw


def odd_request(chance: random.Random) -> bytes:
    """The bytes of a request, mostly a question."""
    body = odd_question(chance)
    is_plain = chance.random() < 0.7
    method = "POST" if is_plain else chance.choice(METHODS)
    path = chance.choice(PATHS[1:3]) if is_plain else chance.choice(PATHS)
    kind = TYPES[0] if is_plain else chance.choice(TYPES)
    host = HOSTS[0] if is_plain else chance.choice(HOSTS)
    length = len(body) if is_plain else chance.choice([len(body), 0, len(body) + 9, 1 << 40, -1])
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}", f"Content-Length: {length}"]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
    if chance.random() < 0.1:
        head = changed_bytes(head, chance)
    return head + body


def problem_of(place: str, raw: bytes) -> str:
    """What is wrong with the answer to a request; empty if nothing is. Half a request may be left unanswered."""
    host, _, port = place.partition(":")
    with socket.create_connection((host, int(port)), SECONDS) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            body = answer.read()
        except (http.client.HTTPException, ConnectionError, TimeoutError):
            return ""
    if answer.status >= 500 or b"Traceback" in body:
        return f"{raw!r:.600}: status {answer.status}: {body!r:.300}"
    return ""


def run_requests(place: str, cases: int, seed: int) -> list[str]:
    """The requests that were not answered well. In between the server must answer a sound one."""
    chance = random.Random(seed)
    failed: list[str] = []
    for number in range(cases):
        problem = problem_of(place, odd_request(chance))
        if problem:
            failed.append(f"case {number}: {problem}")
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("POST", "/answer", json.dumps(QUESTION), {"Content-Type": "application/json"})
    status = connection.getresponse().status
    if status != 200:
        failed.append(f"a sound question behind all is answered with {status}")
    connection.close()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    begun = time.monotonic()
    with served() as place:  # which fails for a traceback of the server
        failed = run_requests(place, options.cases, options.seed)
    for problem in failed:
        print(problem)
    seconds = time.monotonic() - begun
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"requests: {len(failed)} of {options.cases} failed; {seconds:.0f} s, {memory} MiB at most", end="; ")
    print(f"seed {options.seed}")
    return min(100, len(failed))


if __name__ == "__main__":
    sys.exit(main())
