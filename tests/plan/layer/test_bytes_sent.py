"""Bytes that leave a rank: published volumes, and what real modules send."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.run import Config, ModelConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world
from moefold.model.attention.context_parallel import choose_context_mechanisms
from moefold.model.block import ATTENTION_KINDS
from moefold.model.initialise import initialise_parameters
from moefold.model.parts import ModelParts
from moefold.model.token_layout import TokenShard
from moefold.plan.layer.layer_costs import count_piece
from moefold.plan.layer.rank_shapes import RankPortion
from moefold.plan.options import PlanChoices
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import make_tp_projections
from tests.model.test_attention_traffic import BATCH, LATENT, LENGTH, MODEL, NODE, N
from tests.model.test_attention_traffic import sent as sent_ahead
from tests.plan.layer.test_layer_costs import PLAIN, steps
from tests.support.models import attend
from tests.support.ranks import run_ranks


def sent(model: ModelConfig, portion: RankPortion, names: tuple[str, ...], choices: PlanChoices = PLAIN) -> float:
    """Elements that leave a rank in forward."""
    found = count_piece(model, "t", model.layers - 1, portion, choices)
    total = sum(each.forward for step in found.steps if step.name in names for each in step.sent)
    return total / choices.recipe.wide


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("n", [2, 4])
def test_volumes_of_megascale(name: str, n: int):
    """TP attention 2bsh(n-1)/n; SP (2+2/m)/n of bsh(n-1)/n; EP 2k/n of it; gathering and scattering 2 of it, which is
    less than all-to-all from k > n on. Heads make the stream's width in these models, or twice that."""
    model = PRESETS[name]().model
    b, s, h = 2, 4096, model.hidden
    a, k = model.attention, model.moe.top_k
    wide, m = a.heads * a.head_dim / h, a.heads / a.kv_heads
    volume = b * s * h * (n - 1) / n
    assert sent(model, RankPortion(s, b, tp=n), ("attend",)) == 2 * volume
    swapping = RankPortion(s, b, cp=n, context="all_to_all")
    assert sent(model, swapping, ("attend",)) == pytest.approx(volume * wide * (2 + 2 / m) / n)
    for dispatcher, expected in (("all_to_all", 2 * k / n * volume), ("all_gather", 2 * volume)):
        spread = RankPortion(s, b, cp=n, ep=n, dispatcher=dispatcher)
        assert sent(model, spread, ("dispatch", "combine")) == pytest.approx(expected)


def test_a_token_sent_once_to_each_rank_is_sent_less_often_than_once_to_each_expert():
    model = PRESETS["deepseek-v3"]().model
    often, once, nodes = (
        sent(model, RankPortion(4096, ep=64, dispatcher=name), ("dispatch",)) / (4096 * 7168)
        for name in ("all_to_all", "dedup", "hierarchical")
    )
    assert often == 8 * 63 / 64
    assert once == pytest.approx(64 * (1 - (63 / 64) ** 8) * 63 / 64)
    assert nodes > once, "twice on the way, but less between nodes"
    piece = count_piece(model, "t", 60, RankPortion(4096, ep=64, dispatcher="hierarchical"), PLAIN)
    (between, _) = next(step.sent for step in piece.steps if step.name == "dispatch")
    assert between.axis == "ep nodes"
    assert between.forward / 2 < 0.8 * once * 4096 * 7168


def test_deepseek_v3_dispatches_and_combines_116_times_a_forward():
    model = replace(PRESETS["deepseek-v3"]().model, mtp=0)
    travelling = [step for step in steps(model, RankPortion(4096, ep=64)) if step.sent]
    assert len(travelling) == 116


def test_tokens_that_travel_in_fp8_are_half_as_many_bytes_one_way():
    model = PRESETS["qwen3-30b-a3b"]().model
    for step, ratio in (("dispatch", (1 + 4 / 128) / 2), ("combine", 1.0)):
        plain, fp8 = (
            sent(model, RankPortion(4096, ep=8), (step,), replace(PLAIN, travel=travel)) for travel in ("bf16", "fp8")
        )
        assert fp8 / plain == pytest.approx(ratio)


def sent_both_ways(world: World, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Bytes that leave this rank in forward and backward of real attention."""
    world = create_world(world.rank, world.size, world.device, parallel, node_size=NODE)
    kernels = BoundKernels(Facts("cpu", "fp32", hidden=model.hidden))
    contexts = choose_context_mechanisms(parallel.context, kernels, world)
    over_tp = make_tp_projections(Config(), world, kernels)
    made = ModelParts(world, kernels, None, contexts, over_tp, LENGTH)  # pyright: ignore
    attention = ATTENTION_KINDS[model.attention.kind](model, 0, made)
    initialise_parameters(attention, seed=1)
    share = TokenShard(BATCH, LENGTH, world.axis("cp"), world.axis("tp"), torch.device("cpu"))
    with counted_bytes_sent() as counter:
        x_TD = torch.ones(BATCH * LENGTH // N, model.hidden, requires_grad=True)
        attend(attention, x_TD, share).sum().backward()
    return sum(counter.values())


FEW_KEY_HEADS = replace(MODEL, attention=replace(MODEL.attention, kv_heads=2))
LAYOUTS = [
    ParallelConfig(tp=4),
    *(ParallelConfig(cp=4, context=c) for c in ("all_to_all", "all_gather", "ring", "hierarchical")),
]
SENT = [*product((MODEL, LATENT), LAYOUTS), *product([FEW_KEY_HEADS], LAYOUTS[:2])]


@pytest.mark.parametrize(("model", "parallel"), SENT)
def test_real_attention_sends_what_is_counted_there_and_back(model: ModelConfig, parallel: ParallelConfig):
    p = parallel
    portion = RankPortion(LENGTH, BATCH, p.tp, p.cp, context=p.context)
    said = count_piece(model, "t", 0, portion, PlanChoices(precision="fp32", device="cpu", node=NODE)).steps[0].sent
    for ahead in run_ranks(sent_ahead, N, model, parallel):
        assert sum(ahead.values()) == sum(each.forward for each in said)
    for both in run_ranks(sent_both_ways, N, model, parallel):
        assert both == sum(each.forward + each.backward for each in said)
