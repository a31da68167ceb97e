"""Counts of one rank against the anatomy, published FLOPs and volumes, and bytes that real modules send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.anatomy.model_totals import mtp_parameters, total_parameters
from moefold.config.run import ModelConfig
from moefold.plan.layer.layer_costs import PieceCount, StepCount, count_piece, first_alike_layers
from moefold.plan.layer.rank_shapes import RankPortion
from moefold.plan.options import PlanChoices
from moefold.presets.zoo import PRESETS

PLAIN = PlanChoices(stack="megatron", spread=0.0)
DEGREES = [{}, {"tp": 2}, {"cp": 4}, {"ep": 8}, {"tp": 2, "cp": 2, "ep": 4, "etp": 2}]


def pieces(model: ModelConfig, portion: RankPortion, choices: PlanChoices = PLAIN) -> list[PieceCount]:
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    every = [("E", 0), *layers, *ahead, ("L", 0)]
    return [count_piece(model, piece, first_alike_layers(model)[layer], portion, choices) for piece, layer in every]


def steps(model: ModelConfig, portion: RankPortion) -> list[StepCount]:
    return [step for piece in pieces(model, portion) for step in piece.steps]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize(
    ("name", "seq_len", "mtp", "published"),
    [
        ("deepseek-v3", 4096, 1, 260.0e9),
        ("deepseek-v3", 4096, 0, 249.8e9),
        ("qwen3-235b-a22b", 4096, 0, 148.0e9),
        ("qwen3-235b-a22b", 131_072, 0, 734.7e9),
        ("qwen3-30b-a3b", 4096, 0, 23.006e9),
    ],
)
def test_flops_are_the_published_ones_on_any_layout(name: str, seq_len: int, mtp: int, published: float, degrees):
    model = replace(PRESETS[name]().model, mtp=mtp)
    portion = RankPortion(seq_len, 2, **degrees)
    assert 3 * sum(step.flops for step in steps(model, portion)) / portion.tokens == pytest.approx(published, rel=5e-4)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", PRESETS)
def test_products_with_weights_and_attention_are_all_flops_there_are(name: str, degrees: dict[str, int]):
    """But for the router, which published FLOPs leave out."""
    model = PRESETS[name]().model
    for step in steps(model, RankPortion(512, 1, **degrees)):
        products = sum(gemm.flops for gemm in step.gemms if gemm.kind != "router")
        assert products + step.attention == pytest.approx(step.flops, rel=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_all_ranks_together_hold_the_model_once_where_nothing_is_replicated(name: str):
    model = PRESETS[name]().model
    whole = sum(sum(piece.parameters.values()) for piece in pieces(model, RankPortion(512)))
    assert whole == total_parameters(model) + mtp_parameters(model)
    for degrees in DEGREES:
        cut = {axis: degrees.get(axis, 1) for axis in ("tp", "ep", "etp")}
        found = 0.0
        for piece in pieces(model, RankPortion(512, **degrees)):
            for (_, axes), count in piece.parameters.items():
                for axis in axes:
                    count *= cut[axis]
                found += count
        assert found == pytest.approx(whole, rel=1e-12)


def test_layers_that_are_alike_are_counted_once():
    assert first_alike_layers(PRESETS["deepseek-v3"]().model) == (0,) * 3 + (3,) * 59
    assert first_alike_layers(PRESETS["gpt-oss-20b"]().model) == (0, 1) * 12
