"""Which pieces a stage holds, which rank holds it, and who has a copy of the embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.anatomy.stage_contents import (
    Stage,
    embedding_ranks,
    flops_of_each_piece,
    layout_letters,
    pipeline_layout,
    pipeline_program,
    pipeline_stages,
    rank_of_each_stage,
    whole_model_stage,
)
from moefold.anatomy.step_specs import predict_step, prefixed_model_steps, prefixed_mtp_steps
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.presets.zoo import PRESETS
from moefold.schedule import program as programs
from moefold.schedule.program import is_paired, rank_by_stage
from moefold.schedule.schedule_catalog import SCHEDULES


def config_of(name: str, pp: int, pipeline: PipelineConfig, **model: Any) -> Config:
    config = PRESETS[name]()
    return replace(config, parallel=ParallelConfig(pp=pp), pipeline=pipeline, model=replace(config.model, **model))


TABLE_10 = "Et*3|(tt|)*29m|L"


def test_the_published_layout_of_deepseek_v3_gives_the_published_stages():
    """Table 10: at pp 16 x vpp 2 the embedding and three layers, 29 times two layers, the MTP layer, the loss."""
    config = config_of("deepseek-v3", 16, PipelineConfig("interleaved", 2, TABLE_10))
    stages = pipeline_stages(config)
    assert len(stages) == 32
    assert stages[0] == Stage(0, True, range(3), range(1, 1), False, 0)
    for number in range(1, 30):
        first = 3 + 2 * (number - 1)
        assert stages[number] == Stage(number, False, range(first, first + 2), range(1, 1), False, 0)
    assert stages[30] == Stage(30, False, range(61, 61), range(1, 2), False, 0)
    assert stages[31] == Stage(31, False, range(61, 61), range(2, 2), True, 2)
    assert [number for number, rank in enumerate(rank_of_each_stage(config)) if rank == 0] == [0, 16]
    assert [number for number, rank in enumerate(rank_of_each_stage(config)) if rank == 15] == [15, 31]


def slowest(config: Config) -> float:
    costs = iter(flops_of_each_piece(config.model, config.data.seq_len))
    return max(sum(next(costs) for _ in each) for each in pipeline_layout(config).stages)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-tiny"])
def test_the_proposed_layout_is_at_least_as_even_as_the_published_one(name: str):
    pipeline = PipelineConfig("interleaved", 2, TABLE_10)
    if name == "deepseek-v3":
        config = config_of(name, 16, pipeline)
    else:
        config = config_of(name, 2, replace(pipeline, layout="Et|t|tm|L"), layers=3)
    proposed = replace(config, pipeline=replace(config.pipeline, layout=""))
    assert slowest(proposed) <= slowest(config) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["tiny", "deepseek-v3", "glm-4.5-air", "gpt-oss-20b"])
def test_what_pieces_cost_is_what_their_steps_cost_and_the_embedding_next_to_nothing(name: str):
    model = PRESETS[name]().model
    embedding, *costs = flops_of_each_piece(model, 4096)
    every = sum(step.flops(4096) for _, step in [*prefixed_model_steps(model), *prefixed_mtp_steps(model)])
    assert sum(costs) == pytest.approx(every)
    assert costs[-1] == predict_step(model).flops(4096) > 0
    assert 0 < embedding < min(costs)


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 3), st.integers(1, 6), st.data())
def test_stages_cover_every_piece_once_and_in_order(layers: int, dense: int, mtp: int, pp: int, data: st.DataObject):
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)))
    legal = [v for v in (1, 2, 3) if SCHEDULES[schedule].accepts_vpp(v) and pp * v <= layers + mtp + 2]
    if not legal:
        return
    config = config_of("tiny", pp, PipelineConfig(schedule, data.draw(st.sampled_from(legal))), layers=layers, mtp=mtp)
    config = replace(
        config, model=replace(config.model, moe=replace(config.model.moe, dense_layers=min(dense, layers)))
    )
    stages = pipeline_stages(config)
    assert len(stages) == pp * config.pipeline.vpp
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [depth for stage in stages for depth in stage.ahead] == list(range(1, mtp + 1))
    assert [stage.number for stage in stages] == list(range(len(stages)))
    assert [stage.embeds for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.predicts for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert "".join(pipeline_layout(config).stages) == layout_letters(config.model)
    assert len(flops_of_each_piece(config.model, 64)) == len(layout_letters(config.model))
    assert set(rank_of_each_stage(config)) == set(range(pp))


@settings(deadline=None)
@given(st.integers(0, 4), st.lists(st.booleans(), min_size=12, max_size=12))
def test_streams_set_aside_before_a_stage_are_the_models_own_and_one_for_each_layer_ahead(mtp: int, cuts: list[bool]):
    flat = "Ettt" + "m" * mtp + "L"
    text = "".join(
        piece + "|" * (cut and i < len(flat) - 1) for i, (piece, cut) in enumerate(zip(flat, cuts, strict=False))
    )
    count = text.count("|") + 1
    config = config_of("tiny", count, PipelineConfig(layout=text), layers=3, mtp=mtp)
    ahead = 0
    for stage in pipeline_stages(config):
        assert stage.aside == (ahead + 1 if ahead else 0)
        ahead += len(stage.ahead)


def test_one_stage_is_the_whole_model():
    for name in ("tiny", "deepseek-v3-tiny"):
        config = config_of(name, 1, PipelineConfig())
        assert pipeline_stages(config) == [whole_model_stage(config.model)]
        assert embedding_ranks(config) == [0]


COPIES = [
    ({}, PipelineConfig(layout="Et|t|t|tL"), [0]),
    ({"tied_head": True}, PipelineConfig(layout="Et|t|t|tL"), [0, 3]),
    ({"mtp": 1}, PipelineConfig(layout="Et|tt|tm|L"), [0, 2]),
    ({"mtp": 1, "tied_head": True}, PipelineConfig(layout="Et|tt|tm|L"), [0, 2, 3]),
    ({"mtp": 2}, PipelineConfig(layout="Ett|ttm|m|L"), [0, 1, 2]),
    ({"mtp": 1}, PipelineConfig(layout="E|tt|tt|mL"), [0, 3]),
    ({"tied_head": True}, PipelineConfig("interleaved", 2), [0, 3]),
    ({"tied_head": True}, PipelineConfig("zb_v", 2), [0]),
    ({"mtp": 1, "tied_head": True}, PipelineConfig("dualpipe_v", 2, layout="Et|t|t|t|t|t|m|L"), [0, 1]),
]


@pytest.mark.parametrize(("model", "pipeline", "ranks"), COPIES, ids=str)
def test_the_ranks_that_look_up_tokens_or_share_the_head_hold_the_embedding(
    model: dict[str, Any], pipeline: PipelineConfig, ranks: list[int]
):
    layers = pipeline.layout.count("t") or 8
    assert embedding_ranks(config_of("tiny", 4, pipeline, layers=layers, **model)) == ranks


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pair", "defer"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_programs_are_whole_and_lie_where_the_stages_lie(name: str, pair: bool, defer: bool, pp: int):
    for vpp in [v for v in (1, 2, 3) if SCHEDULES[name].accepts_vpp(v)]:
        config = config_of("tiny", pp, PipelineConfig(name, vpp, pair=pair, defer=defer), layers=12)
        for microbatches in (1, 2, 3, 7):
            program = pipeline_program(config, microbatches)
            assert not programs.program_problems(program, pp * vpp, microbatches)
            assert rank_by_stage(program) == rank_of_each_stage(config)
            paired = any(is_paired(slot) for slots in program for slot in slots)
            assert not pair or microbatches < 2 * pp * vpp or paired


def has_lone_weight_gradients(pipeline: PipelineConfig) -> bool:
    program = pipeline_program(config_of("tiny", 2, pipeline, layers=8), 4)
    return any([op.kind for op in slot] == ["W"] for slots in program for slot in slots)


def test_weight_gradients_are_deferred_where_the_schedule_or_the_user_says_so():
    assert not has_lone_weight_gradients(PipelineConfig())
    assert not has_lone_weight_gradients(PipelineConfig("gpipe", 2))
    for pipeline in (
        PipelineConfig("zb_h1"),
        PipelineConfig("zb_v", 2),
        PipelineConfig("dualpipe_v", 2),
        PipelineConfig(defer=True),
    ):
        assert has_lone_weight_gradients(pipeline), pipeline
