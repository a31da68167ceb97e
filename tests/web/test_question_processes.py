"""Questions are answered in processes, which do not outlive their time, their client or the server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from moefold.web.planner_questions import Reply
from moefold.web.question_processes import QuestionProcesses
from tests.support.launched import is_alive, wait_until

LONG = {"model": "deepseek-v3", "gpus": 1024, "gpu": "h100", "search": True}
SHORT = {"model": "tiny", "gpus": 8, "gpu": "h100", "parallel.ep": 8}


def request_until(seconds: float) -> Request:
    """A request whose client leaves after some seconds."""

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


async def ask_one(
    processes: QuestionProcesses, question: dict[str, Any], stays: float, limit: float
) -> tuple[Reply, int]:
    """The reply, and the number of the process that was asked."""
    if not processes.idle:
        processes.idle.append(await processes.start())
    pid = processes.idle[-1].pid
    return await processes.ask(request_until(stays), "answer", question, limit), pid


async def ask_all() -> tuple[list[int], list[int]]:
    """Statuses and processes of: two answers, a question whose time is up, one whose client leaves, an answer."""
    processes = QuestionProcesses()
    asked = [(SHORT, 600, 300), (SHORT, 600, 300), (LONG, 600, 0.3), (LONG, 0.3, 300), (SHORT, 600, 300)]
    found = [await ask_one(processes, *each) for each in asked]
    await processes.end()
    return [status for (status, _), _ in found], [pid for _, pid in found]


def test_a_process_is_kept_after_its_answer_and_killed_when_its_time_is_up_or_its_client_has_left():
    statuses, pids = asyncio.run(ask_all())
    assert statuses == [200, 200, 503, 499, 200]
    assert pids[0] == pids[1] == pids[2], "one process answers several questions"
    assert len(set(pids)) == 3, "a killed one is replaced"
    assert wait_until(lambda: not any(map(is_alive, pids)))
