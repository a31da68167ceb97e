"""Questions of the page to the planner: JSON in, a status and JSON out; a refusal is a list of sentences.

Questions are answered in separate processes that can be killed, a line each:

    echo '["answer", {"model": "qwen3-30b-a3b", "search": true}]' | python -m moefold.web.planner_questions
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from moefold.config.errors import UserError, one_of
from moefold.plan.answer import answer_request
from moefold.plan.machine.gpu import known_gpu_names
from moefold.plan.request import read_request
from moefold.presets.zoo import PRESETS
from moefold.web.legal_layouts import legal_layouts
from moefold.web.own_model import own_model

RawQuestion = Mapping[str, Any]
JsonObject = dict[str, Any]
Reply = tuple[int, JsonObject]


def reply_or_refusal(answer: Callable[[RawQuestion], JsonObject], raw: RawQuestion) -> Reply:
    try:
        require_known_names(raw)
        return 200, answer(raw)
    except UserError as refused:
        return 422, {"problems": list(refused.problems)}


def require_known_names(raw: RawQuestion) -> None:
    """Refuse models and GPUs that are not in the package: a page must not read files of the machine."""
    model = str(raw.get("model", "tiny"))
    gpu = str(raw.get("gpu", "h100"))
    one_of("model", model, PRESETS)
    one_of("GPU", gpu.lower(), known_gpu_names())


def ask_plan_answer(raw: RawQuestion) -> Reply:
    return reply_or_refusal(answer_request, raw)


def ask_legal_layouts(raw: RawQuestion) -> Reply:
    request = dict(raw)
    hold = str(request.pop("hold", ""))
    return reply_or_refusal(lambda request: legal_layouts(request, hold), request)


def ask_own_model(raw: RawQuestion) -> Reply:
    return reply_or_refusal(own_model, raw)


def ask_needs_search(raw: RawQuestion) -> Reply:
    """Whether an answer needs a search, which takes seconds."""
    return reply_or_refusal(needs_search, raw)


def needs_search(raw: RawQuestion) -> JsonObject:
    request = read_request(raw)
    return {"search": request.search}


QUESTIONS = {
    "answer": ask_plan_answer,
    "legal": ask_legal_layouts,
    "model": ask_own_model,
}


def answer_lines() -> None:
    """Answer the questions of standard input until it ends."""
    for line in sys.stdin:
        kind, raw = json.loads(line)
        reply = QUESTIONS[kind](raw)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    answer_lines()
