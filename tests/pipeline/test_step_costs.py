"""Costs of steps, from the configuration alone: what takes long costs much, and knowing it shortens paired slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.anatomy.step_specs import block_step_specs
from moefold.config.run import Config
from moefold.model.steps import Step
from moefold.pipeline.segments import segments_for_pairing
from moefold.pipeline.step_costs import StepCosts
from moefold.pipeline.strand_order import Strand, StrandPiece, backward_strand, interleave_strands
from moefold.presets.zoo import PRESETS
from tests.pipeline.test_strand_order import clock


def on_ranks(name: str, ep: int) -> Config:
    config = PRESETS[name]()
    train = replace(config.train, micro_batch=1)
    return replace(config, train=train, parallel=replace(config.parallel, ep=ep))


def seconds_by_step(config: Config, node_size: int, device: str = "cuda") -> dict[str, float]:
    costs = StepCosts(config, device, node_size)
    layer = config.model.layers - 1
    return {spec.name: costs.seconds(spec) for spec in block_step_specs(config.model, layer)}


def test_costs_of_deepseek_v3_are_in_the_order_of_its_times():
    near = seconds_by_step(on_ranks("deepseek-v3", 8), node_size=8)
    assert near["experts"] > near["attend"] > near["shared"] > near["route"] > 0
    assert near["dispatch"] == near["combine"] > near["plan"] > 0
    far = seconds_by_step(on_ranks("deepseek-v3", 64), node_size=8)
    assert far["dispatch"] > 1.5 * near["dispatch"], "over the network an exchange takes longer"
    assert far["experts"] == near["experts"], "each rank has as many rows"


def test_an_exchange_on_one_rank_costs_next_to_nothing():
    alone = seconds_by_step(on_ranks("deepseek-v3", 1), node_size=1)
    assert alone["dispatch"] < 0.2 * alone["experts"]


def strand(config: Config, node_size: int, even: bool) -> Strand:
    costs = StepCosts(config, "cuda", node_size)
    layer = config.model.layers - 1
    steps = [Step(spec, lambda carry: carry) for _ in range(4) for spec in block_step_specs(config.model, layer)]
    pieces: list[StrandPiece] = []
    for segment in segments_for_pairing(steps):
        seconds = sum(costs.seconds(step.spec) for step in segment.steps)
        pieces.append(StrandPiece(segment.lane, 1.0 if even else seconds, segment.needs))
    return tuple(pieces)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b", "qwen2-57b-a14b", "mixtral-8x7b"])
@pytest.mark.parametrize("ep", [8, 64])
def test_a_pair_ordered_by_costs_is_not_longer_than_one_ordered_as_if_all_steps_took_the_same(name: str, ep: int):
    config = on_ranks(name, min(ep, PRESETS[name]().model.moe.experts))
    forward = strand(config, 8, even=False)
    pair = forward, backward_strand(forward, 2.0)
    forward = strand(config, 8, even=True)
    as_if_even = interleave_strands((forward, backward_strand(forward, 1.0)))
    length = max(end for _, end in clock(interleave_strands(pair), pair).values())
    blind = max(end for _, end in clock(as_if_even, pair).values())
    assert length <= blind
    if (name, ep) == ("deepseek-v3", 64):
        assert length < 0.92 * blind
