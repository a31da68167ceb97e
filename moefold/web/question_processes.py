"""Processes that answer the questions of the page, each one question at a time.

A question that takes too long, or whose client has left, is ended by killing its process; one that answered waits for
the next question.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from asyncio.subprocess import Process
from contextlib import suppress

from starlette.requests import Request

from moefold.web.planner_questions import JsonObject, Reply

COMMAND = (sys.executable, "-m", "moefold.web.planner_questions")
LONGEST_REPLY = 64 << 20  # bytes
FAILED = "the planner failed; the terminal of moefold web shows the error"
ENDING = "moefold web is ending"


class QuestionProcesses:
    def __init__(self) -> None:
        self.idle: list[Process] = []
        self.started: list[Process] = []  # those that may be alive

    async def ask(self, request: Request, kind: str, raw: JsonObject, seconds: float) -> Reply:
        """The reply to a question, if it comes within its time and before the client leaves."""
        process = self.idle.pop() if self.idle else await self.start()
        answer = asyncio.create_task(exchange(process, kind, raw))
        disconnect = asyncio.create_task(wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, disconnect}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Nothing waits for this task when the server shuts down: it may end as an answer.
            return refuse(503, ENDING)
        finally:
            left = disconnect.done()
            disconnect.cancel()
            if not answer.done():
                answer.cancel()
                process.kill()
        if answer.done():
            return self.reply_of(process, answer)
        if left:
            return 499, {}
        return refuse(503, f"no answer within {seconds:g} s: it was ended; fix more of the layout, or ask for less")

    async def start(self) -> Process:
        self.started = [process for process in self.started if process.returncode is None]
        process = await start_process()
        self.started.append(process)
        return process

    def reply_of(self, process: Process, answer: asyncio.Task[bytes]) -> Reply:
        raw = b"" if answer.exception() else answer.result()
        if not raw:
            if process.returncode is None:
                process.kill()
            return refuse(500, FAILED)
        self.idle.append(process)
        status, body = json.loads(raw)
        return status, body

    async def end(self) -> None:
        for process in self.started:
            await end_process(process)
        self.started.clear()
        self.idle.clear()


def refuse(status: int, problem: str) -> Reply:
    return status, {"problems": [problem]}


async def start_process() -> Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the server alone, which ends it
        limit=LONGEST_REPLY,
    )


async def end_process(process: Process) -> None:
    """Kill a process and close its pipes, which would complain if the event loop ended before them."""
    assert process.stdin is not None
    if process.returncode is None:
        process.kill()
    process.stdin.close()
    await process.wait()
    with suppress(OSError):  # a question that was being sent
        await process.stdin.wait_closed()


async def exchange(process: Process, kind: str, raw: JsonObject) -> bytes:
    """One question and its reply; empty if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    question = json.dumps([kind, raw])
    process.stdin.write(f"{question}\n".encode())
    await process.stdin.drain()
    return await process.stdout.readline()


async def wait_for_disconnect(request: Request) -> None:
    message = await request.receive()
    while message["type"] != "http.disconnect":
        message = await request.receive()
