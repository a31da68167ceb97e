"""Experts with a limit keep the choices they should, and the rest passes them by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moefold.config.run import CapacityConfig, MoeConfig
from moefold.dispatch.base import Routing
from moefold.dispatch.build import expert_capacity
from moefold.layout.axes import Axis
from moefold.model.moe.capacity import drop_beyond_capacity, drops_choices, within_capacity
from moefold.model.token_layout import TokenShard
from tests.support.models import with_moe_keys

MOE = MoeConfig(experts=4, top_k=2, capacity=CapacityConfig(factor=1.0))
ALONE = Axis("alone")


def routing(tokens: int, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(tokens, 4, generator=generator) - torch.arange(4.0)).softmax(-1)
    return Routing(*scores.topk(2))


def share(tokens: int) -> TokenShard:
    return TokenShard(1, tokens, ALONE, ALONE, torch.device("cpu"))


def test_capacity_counts_every_choice_of_every_token():
    assert expert_capacity(MOE, 16) == 8
    assert expert_capacity(with_moe_keys(MOE, capacity_factor=1.25), 10) == 7, "rounded up"


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_no_expert_gets_more_than_its_capacity_and_none_drops_below_it_needlessly(drop: str):
    before = routing(32)
    after = drop_beyond_capacity(before, with_moe_keys(MOE, drop=drop), share(32), ALONE)
    most = expert_capacity(MOE, 32)
    for expert in range(4):
        had, has = ((r.ids_TK == expert).sum().item() for r in (before, after))
        assert has == min(had, most)
    assert ((after.weights_TK == 0) == (after.ids_TK < 0)).all(), "what is dropped weighs nothing"
    kept = after.ids_TK >= 0
    assert torch.equal(after.weights_TK[kept], before.weights_TK[kept]), "what stays weighs the same"


def test_the_likelier_stay_or_the_earlier_as_asked():
    ids = torch.zeros(4, 1, dtype=torch.int64)
    probs = torch.tensor([[0.1], [0.4], [0.2], [0.3]])
    one = with_moe_keys(MOE, experts=1, top_k=1, capacity_factor=0.5)
    by_weight = drop_beyond_capacity(Routing(probs, ids), one, share(4), ALONE)
    assert by_weight.ids_TK.flatten().tolist() == [-1, 0, -1, 0]
    by_place = drop_beyond_capacity(Routing(probs, ids), with_moe_keys(one, drop="position"), share(4), ALONE)
    assert by_place.ids_TK.flatten().tolist() == [0, 0, -1, -1]


def test_of_equals_the_earlier_stays():
    ids, liking = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    assert within_capacity(ids, liking, 1, 2).flatten().tolist() == [True, True, False, False, False]


def test_without_a_capacity_nothing_is_dropped():
    assert drops_choices(MOE)
    assert not drops_choices(with_moe_keys(MOE, capacity_factor=0.0))


def kept_by_loop(routing: Routing, moe: MoeConfig) -> list[list[int]]:
    """Choices are asked in order of liking, of equals the earlier; who comes to a full expert, or group, is dropped."""
    tokens, size = len(routing.ids_TK), moe.experts // moe.balance.devices if moe.capacity.per_device else 1
    most = math.ceil(moe.capacity.factor * tokens * moe.top_k / moe.experts) * size
    kept, taken = routing.ids_TK.tolist(), [0] * moe.experts
    probs = routing.weights_TK.tolist()
    asked = [
        (-probs[t][k] if moe.capacity.drop == "probability" else t, t, k)
        for t in range(tokens)
        for k in range(moe.top_k)
    ]
    for _, t, k in sorted(asked):
        if kept[t][k] < 0:
            continue
        taken[kept[t][k] // size] += 1
        if taken[kept[t][k] // size] > most:
            kept[t][k] = -1
    return kept


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("devices", [0, 1, 2, 4])
def test_capacity_of_experts_and_of_groups_of_them_equals_a_loop(devices: int, drop: str, factor: float):
    moe = with_moe_keys(MOE, capacity_factor=factor, drop=drop, devices=max(1, devices), device_capacity=devices > 0)
    for seed in range(4):
        before = routing(24, seed)
        before.ids_TK[::7, 1], before.weights_TK[::7, 1] = -1, 0  # no choice takes no place
        after, kept = drop_beyond_capacity(before, moe, share(24), ALONE), kept_by_loop(before, moe)
        assert after.ids_TK.tolist() == kept
        assert torch.equal(after.weights_TK, before.weights_TK * (torch.tensor(kept) >= 0))


def test_a_group_of_experts_is_full_together_and_not_one_by_one():
    ids, probs = torch.tensor([[0, 2], [0, 2], [0, 3], [1, 3]]), torch.full((4, 2), 0.5)
    moe = with_moe_keys(MOE, capacity_factor=0.5, drop="position")
    each = drop_beyond_capacity(Routing(probs, ids), moe, share(4), ALONE)
    assert each.ids_TK.tolist() == [[0, 2], [-1, -1], [-1, 3], [1, -1]], "each has one place"
    paired = drop_beyond_capacity(
        Routing(probs, ids),
        replace(moe, capacity=replace(moe.capacity, per_device=True), balance=replace(moe.balance, devices=2)),
        share(4),
        ALONE,
    )
    assert paired.ids_TK.tolist() == [[0, 2], [0, 2], [-1, -1], [-1, -1]], "two have two, for whoever comes first"


def test_gradients_reach_what_is_kept_and_nothing_that_is_dropped():
    before = routing(24)
    probs = before.weights_TK.double().requires_grad_()
    after = drop_beyond_capacity(Routing(probs, before.ids_TK), MOE, share(24), ALONE)
    (gradient,) = torch.autograd.grad(after.weights_TK.sum(), probs)
    assert torch.equal(gradient, (after.ids_TK >= 0).double())
    assert (gradient == 0).any()


def test_experts_that_choose_drop_nothing_more():
    assert not drops_choices(with_moe_keys(MOE, router="expert_choice"))


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("devices", [0, 2])
def test_a_capacity_over_full_sequences_is_that_of_each_sequence_by_itself(devices: int, drop: str):
    """As if every sequence came in a microbatch of its own."""
    moe = with_moe_keys(MOE, capacity_factor=0.7, drop=drop, devices=max(1, devices), device_capacity=devices > 0)
    moe = replace(moe, capacity=replace(moe.capacity, over="full_sequence"))
    together = routing(48)
    weights_TK, ids_TK = together
    ids_TK[:16] = ids_TK[0]  # the first sequence fills its experts; the others lose nothing by it
    three = TokenShard(3, 16, ALONE, ALONE, torch.device("cpu"))
    found = drop_beyond_capacity(together, moe, three, ALONE)
    apart = [
        drop_beyond_capacity(Routing(weights_TK[part], ids_TK[part]), moe, share(16), ALONE).ids_TK
        for part in (slice(0, 16), slice(16, 32), slice(32, 48))
    ]
    assert torch.equal(found.ids_TK, torch.cat(apart))
