"""000 Tables 10 and 17: DeepSeek-V3 on 256 GB200 and on 1,024 H100, layout strings and all."""

from typing import Any

import pytest

from moefold.plan.answer import answer_request
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.presets.recipe import resolve_recipe

COMMON = {"model": "deepseek-v3", "gbs": 8192, "mbs": 1, "stack": "megatron", "spread": 0, "optim.moments": "bf16"}
GB200 = {
    **COMMON,
    "gpu": "gb200",
    "gpus": 256,
    "precision": "mxfp8",
    "dispatcher": "hybridep",
    "recompute": "mlp",
    "graphs": "partial",
    "states_on_host": True,
    "quantized_weights": True,
    "parallel.pp": 4,
    "pipeline.vpp": 4,
    "parallel.ep": 64,
    "pipeline.layout": "Et*4|(tttt|)*14tmL",
}
H100 = {
    **COMMON,
    "gpu": "h100",
    "gpus": 1024,
    "precision": "fp8-blockwise",
    "dispatcher": "deepep",
    "overlap": True,
    "recompute": "mlp,mla_up_proj,moe_act,layernorm",
    "quantized_weights": True,
    "parallel.tp": 2,
    "parallel.pp": 8,
    "pipeline.vpp": 4,
    "parallel.ep": 64,
    "pipeline.layout": "Et*3|(tt|)*29m|L",
}


@pytest.mark.parametrize(("asked", "published"), [(GB200, 1048), (H100, 368)])
def test_published_throughput_is_met_without_any_factor(asked: dict[str, Any], published: float):
    assert answer_request(asked)["tflops_per_gpu"] == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("asked", [GB200, H100])
def test_published_layouts_fit_their_cards(asked: dict[str, Any]):
    assert answer_request(asked)["fits"]


@pytest.mark.parametrize("asked", [GB200, H100])
def test_the_cut_proposed_here_is_about_as_fast_as_the_published_one(asked: dict[str, Any]):
    theirs = answer_request(asked)["step_s"]
    ours = answer_request({key: value for key, value in asked.items() if key != "pipeline.layout"})["step_s"]
    assert ours < 1.05 * theirs


def test_table_10_lies_on_its_ranks():
    words = ["--parallel.pp=16", "--pipeline.vpp=2", "--pipeline.layout=Et*3|(tt|)*29m|L", "--train.global_batch=16"]
    ranks = stages_by_rank(resolve_recipe("deepseek-v3", words, 16))
    written = ["|".join("".join(piece for piece, _ in stage) for stage in rank.pieces) for rank in ranks]
    assert written == ["Ettt|tt", *["tt|tt"] * 13, "tt|m", "tt|L"]
