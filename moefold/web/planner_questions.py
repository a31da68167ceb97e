"""One question from the page to the planner: JSON in, a status and JSON out. What cannot be is told in sentences.

The page's questions are answered here, in this process or, for a search, in one that can be ended:

    echo '{"model": "qwen3-30b-a3b", "search": true}' | python -m moefold.web.planner_questions
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

Reply = tuple[int, dict[str, Any]]


def reply_or_refusal(question: Callable[[], dict[str, Any]]) -> Reply:
    try:
        return 200, question()
    except UserError as refused:
        return 422, {"problems": list(refused.problems)}


def require_known_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request, if it names nothing but what the package holds: a page reads no files of the machine it runs on."""
    one_of("model", str(raw.get("model", "tiny")), PRESETS)
    one_of("GPU", str(raw.get("gpu", "h100")).lower(), known_gpu_names())
    return raw


def ask_plan_answer(raw: Mapping[str, Any]) -> Reply:
    return reply_or_refusal(lambda: answer_request(require_known_names(raw)))


def ask_legal_layouts(raw: Mapping[str, Any]) -> Reply:
    asked = dict(raw)
    hold = str(asked.pop("hold", ""))
    return reply_or_refusal(lambda: legal_layouts(require_known_names(asked), hold))


def ask_needs_search(raw: Mapping[str, Any]) -> Reply:
    """Whether an answer takes a search, which takes seconds."""
    return reply_or_refusal(lambda: {"search": read_request(require_known_names(raw)).search})


if __name__ == "__main__":
    json.dump(ask_plan_answer(json.load(sys.stdin)), sys.stdout)
