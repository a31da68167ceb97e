"""The one question to the planner: what comes back is whole, plain and consistent; what cannot be is refused."""

import json
from itertools import pairwise
from typing import Any

import pytest

from moefold.config.errors import UserError
from moefold.plan.answer import answer_request

ONE = {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100", "gbs": 128, "mbs": 1, "parallel.ep": 16}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return answer_request(ONE)


@pytest.fixture(scope="module")
def searched() -> dict[str, Any]:
    return answer_request(
        {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "gb200", "gbs": 128, "precision": "mxfp8", "best": 4}
    )


def test_numbers_follow_from_each_other(one: dict[str, Any]):
    assert one["tokens_per_step"] == 128 * 4096
    assert one["tokens_per_s_per_gpu"] == pytest.approx(one["tokens_per_step"] / one["step_s"] / 16)
    assert one["tflops_per_gpu"] == pytest.approx(one["tokens_per_s_per_gpu"] * one["flops_per_token"] / 1e12)
    assert one["mfu"] == pytest.approx(one["tflops_per_gpu"] / 989.5)
    assert one["flops_per_token"] == pytest.approx(23.006e9, rel=1e-3)
    assert sum(one["time_by_wall"].values()) == pytest.approx(one["step_s"])
    assert sum(one["time_parts"].values()) == pytest.approx(one["step_s"])
    assert one["memory_gib"] == max(one["memory_by_rank"])
    budget = one["budget"]
    assert budget["gpu_hours"] == pytest.approx(budget["tokens"] / one["tokens_per_s_per_gpu"] / 3600)


def test_parts_of_memory_add_up(one: dict[str, Any]):
    for total, parts in zip(one["memory_by_rank"], one["memory_parts_by_rank"], strict=True):
        assert sum(size for name, size in parts.items() if name != "outside") == pytest.approx(total)


def test_it_is_plain_data(one: dict[str, Any], searched: dict[str, Any]):
    for each in (one, searched):
        assert json.loads(json.dumps(each)) == each


def test_a_timeline_shows_every_rank_and_never_two_slots_at_once():
    keys = {"parallel.pp": 4, "pipeline.vpp": 2, "parallel.ep": 4}
    spans = answer_request({**ONE, **keys})["timeline"]["spans"]
    assert {span["rank"] for span in spans} == {0, 1, 2, 3}
    for rank in range(4):
        mine = sorted((span["start"], span["end"]) for span in spans if span["rank"] == rank)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))


def test_without_a_layout_the_best_is_searched_for(searched: dict[str, Any]):
    assert searched["searched"] > 100
    assert searched["step_s"] == pytest.approx(searched["layouts"][0]["step_s"])
    assert searched["fits"]
    assert len(searched["layouts"]) <= 4
    assert {"reason", "count", "example"} == set(searched["rejected"][0])


def test_a_layout_found_makes_itself_again(searched: dict[str, Any]):
    at = searched["layouts"][0]["layout"]
    again = {
        "model": "qwen3-30b-a3b",
        "gpus": 16,
        "gpu": "gb200",
        **{key: at[key] for key in ("seq", "mbs", "gbs", "precision", "overlap", "graphs", "dispatcher")},
        "recompute": ",".join(at["recompute"]),
        **{f"parallel.{key}": at[key] for key in ("tp", "cp", "pp", "ep", "etp")},
        "pipeline.vpp": at["vpp"],
    }
    found = answer_request(again)
    assert found["step_s"] == pytest.approx(searched["step_s"])
    assert found["memory_gib"] == pytest.approx(searched["memory_gib"])


def test_text_is_read_as_numbers_are():
    """As a page's address has it."""
    text = {key: str(value) for key, value in ONE.items()}
    assert answer_request({**text, "search": "false"})["step_s"] == answer_request(ONE)["step_s"]


def test_words_of_other_trainers_are_understood():
    theirs = answer_request({**ONE, "dispatcher": "alltoall", "graphs": "partial", "recompute": "moe_act,layernorm"})
    ours = answer_request({**ONE, "dispatcher": "all_to_all", "graphs": "static", "recompute": "activation,norm"})
    assert theirs["step_s"] == ours["step_s"]


def test_what_does_not_fit_is_said_and_still_planned():
    found = answer_request({"model": "deepseek-v3", "gpus": 64, "gpu": "h100", "parallel.ep": 64})
    assert not found["fits"]
    assert found["memory_gib"] > found["memory_limit_gib"]


def test_explained_has_every_step(one: dict[str, Any]):
    lines = "\n".join(answer_request({**ONE, "explain": True})["explained"])
    assert "explained" not in one
    for word in (
        "GFLOP a token",
        "weights",
        "attend",
        "experts",
        "gate_up: 8 x",
        "expert communication",
        "optimizer",
        "tokens/s a GPU",
    ):
        assert word in lines


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({**ONE, "gpu": "h10"}, r'no GPU "h10".*h100'),
        ({**ONE, "model": "qwen3-30b"}, r'no preset "qwen3-30b"'),
        ({**ONE, "gpus": 0}, "gpus = 0 is not legal"),
        ({**ONE, "gpus": "many"}, "gpus = many is not legal"),
        ({**ONE, "precision": "fp9"}, r'no precision "fp9".*fp8'),
        ({**ONE, "precision": "nvfp4"}, "H100 does not multiply in nvfp4.*fp8-blockwise"),
        ({**ONE, "recompute": "activatoin"}, 'no region "activatoin".*did you mean "activation"'),
        ({**ONE, "parallel.ep": 3}, "parallel.ep = 3 does not divide"),
        ({**ONE, "parallel.eep": 3}, 'no key "parallel.eep"'),
        ({**ONE, "mbss": 3}, 'no option "mbss".*did you mean "mbs"'),
        ({**ONE, "graphs": "all"}, "graphs = all is not legal"),
        ({**ONE, "tokens": -1}, "tokens = -1 is not legal"),
        (
            {"model": "deepseek-v3", "gpus": 8, "gpu": "h100"},
            "no layout of deepseek-v3 fits 8 x H100.*use [0-9]+ GPUs",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_legal_choice(request_: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        answer_request(request_)


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as refused:
        answer_request({**ONE, "precision": "fp9", "parallel.eep": 3, "graphs": "all"})
    assert len(refused.value.problems) == 3
