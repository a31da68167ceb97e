"""One question from the page to the planner: JSON in, a status and JSON out. What cannot be is told in sentences.

The page's questions are answered here, in this process or, for a search, in one that can be ended:

    echo '{"model": "qwen3-30b-a3b", "search": true}' | python -m moefold.web.ask
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from moefold.config.refused import Refused, choose
from moefold.plan.answer import answer
from moefold.plan.hardware import known_gpus
from moefold.plan.request import read_request
from moefold.presets.zoo import PRESETS
from moefold.web.legal import legal

Reply = tuple[int, dict[str, Any]]


def refusing(question: Callable[[], dict[str, Any]]) -> Reply:
    try:
        return 200, question()
    except Refused as refused:
        return 422, {"problems": list(refused.problems)}


def within(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request, if it names nothing but what the package holds: a page reads no files of the machine it runs on."""
    choose("model", str(raw.get("model", "tiny")), PRESETS)
    choose("GPU", str(raw.get("gpu", "h100")).lower(), known_gpus())
    return raw


def ask_answer(raw: Mapping[str, Any]) -> Reply:
    return refusing(lambda: answer(within(raw)))


def ask_legal(raw: Mapping[str, Any]) -> Reply:
    asked = dict(raw)
    hold = str(asked.pop("hold", ""))
    return refusing(lambda: legal(within(asked), hold))


def ask_kind(raw: Mapping[str, Any]) -> Reply:
    """Whether an answer takes a search, which takes seconds."""
    return refusing(lambda: {"search": read_request(within(raw)).search})


if __name__ == "__main__":
    json.dump(ask_answer(json.load(sys.stdin)), sys.stdout)
