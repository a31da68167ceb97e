"""Experts with a limit keep the choices they should, and the rest passes them by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import MoeConfig
from moefold.dispatch.base import Routing
from moefold.dispatch.choose import capacity
from moefold.layout.axes import Axis
from moefold.model.moe.capacity import limited, within_capacity
from moefold.model.share import Share

MOE = MoeConfig(experts=4, top_k=2, capacity_factor=1.0)
ALONE = Axis("alone")


def routing(tokens: int, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(tokens, 4, generator=generator) - torch.arange(4.0)).softmax(-1)
    return Routing(*scores.topk(2))


def share(tokens: int) -> Share:
    return Share(1, tokens, ALONE, ALONE, torch.device("cpu"))


def test_capacity_counts_every_choice_of_every_token():
    assert capacity(MOE, 16) == 8
    assert capacity(replace(MOE, capacity_factor=1.25), 10) == 7, "rounded up"


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_no_expert_gets_more_than_its_capacity_and_none_drops_below_it_needlessly(drop: str):
    before = routing(32)
    after = limited(before, replace(MOE, drop=drop), share(32), ALONE)
    most = capacity(MOE, 32)
    for expert in range(4):
        had, has = ((r.ids_TK == expert).sum().item() for r in (before, after))
        assert has == min(had, most)
    assert ((after.probs_TK == 0) == (after.ids_TK < 0)).all(), "what is dropped weighs nothing"
    kept = after.ids_TK >= 0
    assert torch.equal(after.probs_TK[kept], before.probs_TK[kept]), "what stays weighs the same"


def test_the_likelier_stay_or_the_earlier_as_asked():
    ids = torch.zeros(4, 1, dtype=torch.int64)
    probs = torch.tensor([[0.1], [0.4], [0.2], [0.3]])
    one = replace(MOE, experts=1, top_k=1, capacity_factor=0.5)
    by_weight = limited(Routing(probs, ids), one, share(4), ALONE)
    assert by_weight.ids_TK.flatten().tolist() == [-1, 0, -1, 0]
    by_place = limited(Routing(probs, ids), replace(one, drop="position"), share(4), ALONE)
    assert by_place.ids_TK.flatten().tolist() == [0, 0, -1, -1]


def test_of_equals_the_earlier_stays():
    ids, liking = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    assert within_capacity(ids, liking, 1, 2).flatten().tolist() == [True, True, False, False, False]


def test_without_a_capacity_nothing_is_dropped():
    before = routing(8)
    assert limited(before, replace(MOE, capacity_factor=0.0), share(8), ALONE) is before
