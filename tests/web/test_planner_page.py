"""The page offers what the planner knows, with words for each."""

from moefold.plan.machine.gpu import known_gpu_names
from moefold.plan.options import RECOMPUTE_LADDER
from moefold.web.planner_page import planner_page_data


def test_every_gpu_and_every_full_size_model_is_offered():
    offered = planner_page_data()
    assert [card["name"] for card in offered["gpus"]] == known_gpu_names()
    names = [model["name"] for model in offered["models"]]
    assert {"deepseek-v3", "qwen3-30b-a3b", "tiny"} <= set(names)
    assert not any(name.endswith("-tiny") for name in names)


def test_every_key_has_words_and_every_card_its_precisions():
    offered = planner_page_data()
    assert all(key["doc"] for key in offered["keys"].values())
    assert "mxfp8" in next(card for card in offered["gpus"] if card["name"] == "gb200")["precisions"]
    assert offered["keys"]["sharding"]["choices"] == ["none", "zero", "fsdp"]


def test_every_recompute_of_a_search_can_be_ticked():
    offered = planner_page_data()
    ticked = offered["regions"] | offered["presets"]
    for rung in RECOMPUTE_LADDER:
        assert set(rung) <= set(ticked)
