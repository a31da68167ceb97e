"""Advice beside the figures: each sentence where it applies and nowhere else, with a figure that a plan of its own
confirms; R, eq. 10 and the number of CUDA graphs by their formulas."""

import re
from typing import Any

import pytest

from moefold.plan.advice.advise import advise, answer_beside_figures
from moefold.plan.advice.ratios import (
    between_over_inside,
    compute_over_travel,
    graph_count,
    plan_compute_over_travel,
)
from moefold.plan.advice.sentences import Advice
from moefold.plan.advice.situation import Situation, plan_situation
from moefold.plan.answer import answer_request
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.request import read_request, with_dispatcher

SMALL = {"model": "qwen3-30b-a3b", "gpus": 64, "gpu": "h100", "gbs": 512}
GENEROUS = {**SMALL, "parallel.ep": 8, "parallel.pp": 4, "parallel.tp": 2}
CUT = {"model": "mixtral-8x7b", "gpus": 32, "gpu": "h800", "parallel.ep": 4, "parallel.etp": 2, "parallel.tp": 2}
LARGE = {"model": "deepseek-v3", "gpus": 1024, "gpu": "h100", "gbs": 8192}
TABLE_17 = {**LARGE, "parallel.tp": 2, "parallel.pp": 8, "pipeline.vpp": 4, "parallel.ep": 64}
FEW_TOKENS = {"model": "olmoe-1b-7b", "gpus": 8, "gpu": "h100", "mbs": 1, "seq": 1024, "parallel.ep": 4}
RACK = {"model": "deepseek-v3", "gpus": 256, "gpu": "gb200", "gbs": 2048, "precision": "mxfp8"}
RACK_LAYOUT = {**RACK, "parallel.pp": 4, "pipeline.vpp": 4, "parallel.ep": 64}


def situation(request: dict[str, Any]) -> Situation:
    r = read_request(request)
    config, _ = with_dispatcher(r.config, r.choices, r.gpu, r.gpus)
    return plan_situation(config, r.gpus, r.choices, r.gpu)


def sentences(request: dict[str, Any]) -> list[Advice]:
    return advise(situation(request))


def from_source(request: dict[str, Any], source: str) -> list[str]:
    return [advice.text for advice in sentences(request) if advice.source == source]


APPLIES: dict[str, tuple[dict[str, Any], str, str]] = {  # request, source, what the sentence has
    "less tp": (GENEROUS, "guideline 1", "parallel.tp 1"),
    "experts over domains": (TABLE_17, "guideline 2", "8 NVLink domains of 8"),
    "virtual stages": (GENEROUS, "guideline 3", "pipeline.vpp"),
    "whole experts": (CUT, "guideline 4", "parallel.ep 8, parallel.etp 1"),
    "short sequences": ({**SMALL, "seq": 2048, "parallel.cp": 2, "parallel.ep": 8}, "guideline 5", "parallel.cp 1"),
    "long sequences": (
        {**SMALL, "gbs": 128, "seq": 32768, "mbs": 1, "parallel.ep": 8},
        "guideline 5",
        "parallel.cp 4, parallel.context all_gather",
    ),
    "short of memory": (TABLE_17, "table 13", "optim.moments bf16"),
    "states on the host": ({**SMALL, "gpus": 8, "parallel.ep": 8}, "table 13", "optim.states host"),
    "needless recompute": ({**SMALL, "parallel.ep": 8, "recompute": "layer"}, "table 13", "still fits"),
    "hidden dispatch": ({**SMALL, "parallel.ep": 32, "parallel.pp": 2}, "table 14", "pipeline.pair True"),
    "lighter exchange": (CUT, "table 14", "optim.gradient_reduce bf16"),
    "tp collectives": ({**GENEROUS, "parallel.tp": 4}, "table 14", "collectives of tp 4"),
    "uneven stages": (
        {**SMALL, "parallel.ep": 8, "parallel.pp": 2, "pipeline.layout": "Et*30|t*18L"},
        "table 14",
        "pipeline rank 0 takes",
    ),
    "launches": (GENEROUS, "table 15", "train.micro_batch 2"),
    "graphs": (FEW_TOKENS, "table 15", "graphs static: "),
    "graphs of another trainer": ({**GENEROUS, "stack": "megatron"}, "table 15", "with 1,664 graphs"),
    "graphs of single steps": ({**FEW_TOKENS, "graphs": "static"}, "section 4.3.6", "3 for each captured run of steps"),
    "one graph": (
        {"model": "olmoe-1b-7b", "gpus": 1, "gpu": "h200", "mbs": 1, "gbs": 1, "data.seq_len": 512, "parallel.tp": 1},
        "table 15",
        "graphs whole: ",
    ),
    "low precision": (TABLE_17, "table 16", "precision.recipe fp8_block: "),
    "low precision of another trainer": (
        {**TABLE_17, "stack": "megatron"},
        "table 16",
        "precision fp8-blockwise (not in the trainer yet)",
    ),
}


@pytest.mark.parametrize("name", APPLIES)
def test_a_sentence_is_said_where_it_applies(name: str):
    request, source, part = APPLIES[name]
    found = from_source(request, source)
    assert [text for text in found if part in text], found


ELSEWHERE: dict[str, tuple[dict[str, Any], str, str]] = {
    "less tp": ({**GENEROUS, "parallel.tp": 1}, "guideline 1", "parallel.tp"),
    "experts inside a rack": (RACK_LAYOUT, "guideline 2", ""),
    "no pipeline": ({**SMALL, "parallel.ep": 8}, "guideline 3", ""),
    "whole experts": ({**CUT, "parallel.ep": 8, "parallel.etp": 1}, "guideline 4", ""),
    "a usual length": ({**SMALL, "parallel.ep": 8}, "guideline 5", ""),
    "memory to spare": (GENEROUS, "table 13", ""),
    "even stages": ({**SMALL, "parallel.ep": 8, "parallel.pp": 2}, "table 14", "pipeline rank"),
    "captured graphs": ({**FEW_TOKENS, "graphs": "static"}, "table 15", "graphs static"),
    "graphs that tp forbids": ({**FEW_TOKENS, "parallel.tp": 2}, "table 15", "graphs"),
    "graphs that offload forbids": ({**FEW_TOKENS, "offload": "core"}, "table 15", "graphs"),
    "states that graphs keep on the device": (
        {**SMALL, "gpus": 8, "parallel.ep": 8, "graphs": "static"},
        "table 13",
        "optim.states host",
    ),
    "low precision already": (RACK_LAYOUT, "table 16", "precision"),
    "one rank": ({"model": "olmoe-1b-7b", "gpus": 1, "gpu": "h200", "parallel.ep": 1}, "eq. 8", ""),
    "no copies in a node": (TABLE_17, "eq. 10", ""),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_sentence_is_not_said_elsewhere(name: str):
    request, source, part = ELSEWHERE[name]
    assert not [text for text in from_source(request, source) if part in text]


def test_figures_of_a_proposal_are_those_of_its_own_plan():
    """Each proposed change of a key, asked for as a plan of its own."""
    before = answer_request(GENEROUS)["tokens_per_s_per_gpu"]
    proposed = [advice.text for advice in sentences(GENEROUS)]
    found = re.findall(r"(\w+\.\w+) (\w+): (?:\d+% of the step, )?(\d+)% faster, ([\d.]+) of", "\n".join(proposed))
    assert len(found) >= 3
    for key, value, faster, gib in found:
        answer = answer_request({**GENEROUS, key: value})
        outside = answer["memory_parts_by_rank"][answer["largest_rank"]["rank"]]["outside"]
        assert answer["tokens_per_s_per_gpu"] / before - 1 == pytest.approx(int(faster) / 100, abs=0.006)
        assert min(abs(answer["memory_gib"] + part - float(gib)) for part in (0.0, outside)) < 0.06


def test_the_ratio_is_that_of_the_publication():
    """Eq. 8: 3/2 x ffn x bandwidth / peak x n / (n - 1), with bf16 both ways; fp8 compute halves it, fp8 on the way
    to experts gives a third more."""
    ratio = compute_over_travel(14_336, 200e9, 989e12, 8)
    assert ratio == pytest.approx(1.5 * 14_336 * 200e9 / 989e12 * 8 / 7)
    assert compute_over_travel(14_336, 200e9, 2 * 989e12, 8) == pytest.approx(ratio / 2)
    assert compute_over_travel(14_336, 200e9, 989e12, 8, sent=3.0) == pytest.approx(ratio * 4 / 3)


def test_the_ratio_of_a_plan_is_that_of_its_own_flops_and_bytes():
    """FLOPs of the step `experts` over bytes of an all-to-all there and back."""
    plan = situation({**SMALL, "parallel.ep": 8, "dispatcher": "all_to_all"})
    s, gpu = plan.setting, plan.gpu
    experts = next(step for step in s.count_piece("t", 0).steps if step.name == "experts")
    shapes = s.layer_shapes(0)
    sent = 2 * 2 * shapes.T * shapes.K * shapes.W * 7 / 8
    expected = (experts.flops / gpu.peak_flops("bf16")) / (sent / gpu.inside)
    assert plan_compute_over_travel(s, gpu, gpu.inside) == pytest.approx(expected, rel=1e-6)
    assert from_source({**SMALL, "parallel.ep": 8}, "eq. 8")[0].startswith(f"R = {expected:.2f}: ")


def test_beyond_a_domain_the_ratio_is_told_for_the_network_and_for_nvlink():
    (text,) = from_source(TABLE_17, "eq. 8")
    gpu = find_gpu_by_name("h100")
    between, inside = (1.5 * 2048 * speed / gpu.peak_flops("bf16") * 64 / 63 for speed in (gpu.network, gpu.inside))
    assert text.startswith(f"R = {between:.2f}: tokens travel")
    assert text.endswith(f"inside a domain R would be {inside:.2f}")


@pytest.mark.parametrize(("copies", "replicas"), [(8, 2), (8, 64), (4, 16)])
def test_synchronisation_between_nodes_over_inside_is_equation_ten(copies: int, replicas: int):
    """1/n x (intra-node / inter-node bandwidth) x n (d - 1) / (d (n - 1))"""
    n, d = copies, replicas
    expected = 1 / n * (450 / 50) * n * (d - 1) / (d * (n - 1))
    assert between_over_inside(450e9, 50e9, n, d) == pytest.approx(expected)


def test_replicated_attention_weights_are_told_about():
    request = {"model": "internal-352b", "gpus": 240, "gpu": "h800", "gbs": 720, "parallel.pp": 15}
    shared = {"parallel.cp": 8, "parallel.ep": 8, "parallel.context": "all_to_all"}
    (text,) = from_source({**request, **shared}, "eq. 10")
    assert "held 8 times in a node" in text
    assert f"ratio {between_over_inside(200e9, 50e9, 8, 2):.2f}" in text


def test_graphs_are_layers_by_microbatches_by_two_with_a_pipeline_and_layers_by_two_without():
    """DeepSeek-V3, cut Et*4|(tttt|)*14tmL over 4 ranks: 16 layers on the first ranks."""
    piped = situation(RACK_LAYOUT).setting
    assert graph_count(piped) == 16 * piped.microbatches * 2
    alone = situation({**SMALL, "parallel.ep": 8}).setting
    assert alone.microbatches > 1
    assert graph_count(alone) == 48 * 2
    (text,) = from_source({**SMALL, "parallel.ep": 8}, "section 4.3.6")
    assert "96 on a rank (layers x 2)" in text


def test_beside_the_figures_stand_the_band_and_the_advice():
    plan = situation({**RACK_LAYOUT, "gpu": "b200"})
    beside = answer_beside_figures(plan.setting, plan.gpu, 1000.0)
    band = beside["error_band"]
    assert 0 < band["low"] < band["middle"] < band["high"]
    assert band["runs"] >= 5
    assert "B200" in band["text"]
    assert {"about", "text", "source"} == beside["advice"][0].keys()
