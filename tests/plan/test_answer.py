"""The one question to the planner: what comes back is whole, plain and consistent; what cannot be is refused."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from moefold.config.errors import UserError
from moefold.plan.answer import answer_request
from moefold.plan.remedies import NothingFits

ONE = {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100", "gbs": 128, "mbs": 1, "parallel.ep": 16}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return answer_request(ONE)


@pytest.fixture(scope="module")
def searched() -> dict[str, Any]:
    return answer_request(
        {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "gb200", "gbs": 128, "precision": "mxfp8", "best": 4}
    )


def test_a_layout_without_a_mechanism_has_the_fastest_one_as_a_run_has():
    layout = {"model": "deepseek-v3", "gpus": 32, "gpu": "h100", "gbs": 64, "mbs": 1, "seq": 8192}
    layout |= {"parallel.cp": 32, "parallel.ep": 32, "parallel.pp": 1, "parallel.tp": 1}
    open_one = answer_request(layout)
    seconds = {name: answer_request({**layout, "parallel.context": name})["step_s"] for name in ("ring", "all_to_all")}
    assert open_one["layout"]["parallel.context"] == "all_to_all"
    assert open_one["step_s"] == seconds["all_to_all"] < seconds["ring"]


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
        assert sum(parts.values()) == pytest.approx(total)
        assert parts["outside"] > 0.5


def test_one_figure_of_memory_everywhere(searched: dict[str, Any]):
    """In the headline, the table of layouts, the front, and the rank's own parts: outside the allocator included."""
    best, largest = searched["layouts"][0], searched["largest_rank"]["rank"]
    assert searched["memory_gib"] == pytest.approx(best["memory_gib"])
    assert searched["memory_gib"] == pytest.approx(sum(searched["memory_parts_by_rank"][largest].values()))
    assert searched["front"][0]["memory_gib"] == pytest.approx(best["memory_gib"])


def test_every_dot_of_the_plot_is_simulated(searched: dict[str, Any]):
    """A question about a layout of the front has the figures of its dot as its answer."""
    for dot in (searched["front"][1], searched["front"][-1]):
        again = answer_request(request_for(dot["layout"]))
        assert again["memory_gib"] == pytest.approx(dot["memory_gib"])
        assert again["tokens_per_s_per_gpu"] == pytest.approx(dot["tokens_per_s_per_gpu"])


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


def request_for(layout: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "qwen3-30b-a3b",
        "gpus": 16,
        "gpu": "gb200",
        **{key: layout[key] for key in ("seq", "mbs", "gbs", "precision", "overlap", "graphs", "dispatcher")},
        "recompute": ",".join(layout["recompute"]),
        **{f"parallel.{key}": layout[key] for key in ("tp", "cp", "pp", "ep", "etp")},
        "pipeline.vpp": layout["vpp"],
    }


def test_a_layout_found_makes_itself_again(searched: dict[str, Any]):
    found = answer_request(request_for(searched["layouts"][0]["layout"]))
    assert found["step_s"] == pytest.approx(searched["step_s"])
    assert found["memory_gib"] == pytest.approx(searched["memory_gib"])


QWEN_ON_8 = {"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h100", "gbs": 512}


def test_a_search_proposes_what_the_trainer_can_run():
    """On 8 H100 many layouts of Qwen3-30B need recompute."""
    small = {**QWEN_ON_8, "optim.moments": "bf16"}
    found = answer_request(small)
    assert found["not_in_trainer"] == []
    layouts = (*found["layouts"], *found["front"])
    assert any(each["layout"]["recompute"] for each in layouts)
    assert all(each["not_in_trainer"] == [] for each in layouts)
    kept = answer_request({**small, "recompute": ""})
    assert all(each["layout"]["recompute"] == [] for each in (*kept["layouts"], *kept["front"]))


def test_choices_that_the_trainer_lacks_are_marked_and_not_launched():
    found = answer_request({**ONE, "precision": "fp8", "travel": "fp8", "recompute": "norm"})
    assert found["fits"]
    assert found["not_in_trainer"] == ["precision fp8", "travel fp8"]
    assert found["launch"] is None


ALONE = {"model": "olmoe-1b-7b", "gpus": 1, "gpu": "h200", "mbs": 1, "gbs": 1, "parallel.tp": 1}


def test_a_whole_graph_is_planned_on_one_gpu_and_static_graphs_on_several():
    spread = answer_request({**ALONE, "gpus": 8, "gbs": 8, "parallel.ep": 8, "graphs": "static"})
    assert spread["not_in_trainer"] == []
    assert "graphs: static" in spread["launch"]["config.yaml"]
    for words in ({"graphs": "whole"}, {"memory.graphs": "whole"}):
        found = answer_request(ALONE | words)
        assert found["not_in_trainer"] == []
        assert "graphs: whole" in found["launch"]["config.yaml"]
        assert found["time_by_wall"]["host"] == 0


def test_a_plan_that_a_rule_of_the_trainer_refuses_is_not_launched():
    spread = {**ONE, "parallel.ep": 8, "gpus": 8}
    captured = answer_request(spread | {"graphs": "whole"})
    assert any("memory.graphs = whole" in each for each in captured["not_in_trainer"])
    again = answer_request(spread | {"shard.mode": "zero3", "recompute": "sar"})
    assert any("shard.mode = zero3" in each for each in again["not_in_trainer"])
    assert captured["launch"] is None
    assert again["launch"] is None


@pytest.mark.extended
def test_where_nothing_fits_the_nearest_layout_and_what_would_fit_are_named():
    with pytest.raises(NothingFits) as refused:
        answer_request({"model": "mixtral-8x7b", "gpus": 8, "gpu": "h100"})
    (said,) = refused.value.problems
    assert re.search(r"nearest to fitting: tp \d+, .* needs 9[\d.]+ GiB, the GPU has 79\.1", said)
    assert said.endswith("what fits: --optim.moments bf16, or use 16 GPUs")
    lean = {"optim.moments": "bf16"}
    assert answer_request({"model": "mixtral-8x7b", "gpus": 8, "gpu": "h100", **lean})["fits"]
    assert answer_request({"model": "mixtral-8x7b", "gpus": 16, "gpu": "h100"})["fits"]


def test_where_recompute_would_fit_the_refusal_says_so():
    layout = {f"parallel.{name}": 1 for name in ("tp", "cp", "pp")} | {"parallel.ep": 8, "mbs": 1, "search": True}
    with pytest.raises(NothingFits, match="recompute, chosen by the search: leave --recompute and"):
        answer_request({**QWEN_ON_8, **layout, "recompute": ""})
    found = answer_request({**QWEN_ON_8, **layout})
    assert found["fits"]
    assert found["not_in_trainer"] == []
    assert "recompute:\n  - layer" in found["launch"]["config.yaml"]


def test_the_gpus_and_changes_named_for_a_layout_are_enough():
    layout = {"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h100", "gbs": 64, "mbs": 4, "parallel.ep": 8}
    found = answer_request(layout)
    assert not found["fits"]
    assert found["remedies"]
    for remedy in found["remedies"]:
        words = remedy.split(" (")[0].split()
        changes = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        if "gpus" in changes:
            changes["gbs"] = str(64 * int(changes["gpus"]) // 8)
        if "train.micro_batch" in changes:
            changes["mbs"] = changes.pop("train.micro_batch")
        assert answer_request({**layout, **changes})["fits"], remedy


def test_an_answer_says_what_recompute_saves_and_takes():
    kept = answer_request(ONE)
    assert kept["recompute_cost"] is None
    found = answer_request({**ONE, "recompute": "sar"})
    cost = found["recompute_cost"]
    assert cost["saved_gib"] == pytest.approx(kept["memory_gib"] - found["memory_gib"])
    assert cost["added_s"] == pytest.approx(found["step_s"] - kept["step_s"])
    assert min(cost.values()) > 0


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


HOPPER = {"model": "olmoe-1b-7b", "gpus": 1, "gpu": "h200", "parallel.ep": 1, "precision.recipe": "fp8_block"}


def test_a_recipe_of_the_trainer_is_planned_and_launched():
    answer = answer_request({**HOPPER, "explain": True})
    assert not answer["not_in_trainer"]
    assert answer["layout"]["precision.recipe"] == "fp8_block"
    assert "recipe: fp8_block" in answer["launch"]["config.yaml"]
    assert any("quantised copies" in line for line in answer["explained"])
    plain = answer_request({**HOPPER, "precision.recipe": "plain"})
    parts, plain_parts = (each["memory_parts_by_rank"][0] for each in (answer, plain))
    assert 1.9 < parts["weights"] / plain_parts["weights"] < 2
    assert parts["activations"] < 0.9 * plain_parts["activations"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp8-blockwise"}, "two number formats of the same products"),
        ({"stack": "megatron"}, "a recipe of moefold's layers"),
        ({"gpu": "gb200"}, "kernels for Hopper only"),
    ],
)
def test_a_recipe_where_it_does_not_apply_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        answer_request({**HOPPER, **change})
