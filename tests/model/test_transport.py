"""Choices made for a sequence's tokens together: experts that choose, and optimal transport."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from moefold.config.run import CapacityConfig, MoeConfig
from moefold.model.moe.router import Router
from moefold.model.moe.sequence_choice import expert_choice, sinkhorn_choice, sinkhorn_log_plan
from tests.model.test_router import logits_by_loop, make_router, routed_by_loop, tokens
from tests.support.models import share

KINDS = {"expert_choice": expert_choice, "sinkhorn": sinkhorn_choice}


def logits(sequences: int, length: int, experts: int = 8, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sequences, length, experts, generator=generator, dtype=torch.float64)


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(one) for one in row)
    return [math.exp(one) / total for one in row]


def taken_by_loop(logits_SE: list[list[float]], most: int) -> list[list[int]]:
    """Each expert takes the tokens that like it best, of equals the earlier. For each token who took it, or -1."""
    scores, experts = [softmax(row) for row in logits_SE], len(logits_SE[0])
    rows = [[-1] * experts for _ in scores]
    for e in range(experts):
        for t in sorted(range(len(scores)), key=lambda t: (-scores[t][e], t))[:most]:
            rows[t][e] = e
    return rows


def plan_by_loop(logits_SE: list[list[float]], rounds: int = 16) -> list[list[float]]:
    """Columns and rows scaled in turns, in plain numbers."""
    plan = [[math.exp(one) for one in row] for row in logits_SE]
    tokens, experts = len(plan), len(plan[0])
    for _ in range(rounds):
        sums = [sum(row[e] for row in plan) for e in range(experts)]
        plan = [[one / sums[e] * tokens / experts for e, one in enumerate(row)] for row in plan]
        plan = [[one / sum(row) for one in row] for row in plan]
    return plan


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.3, 8.0])
@pytest.mark.parametrize(("length", "k"), [(16, 2), (10, 3), (3, 1)])
def test_each_expert_takes_exactly_its_capacity_of_each_sequence_those_that_like_it_best(length: int, k: int, factor):
    moe = MoeConfig(experts=8, top_k=k, capacity=CapacityConfig(factor=factor))
    most = min(length, math.ceil((factor or 1.0) * length * k / 8))
    given = logits(3, length)
    found = expert_choice(given, moe)
    for sequence, expected in zip(found.tolist(), given.tolist(), strict=True):
        assert sequence == taken_by_loop(expected, most)
        assert all(sum(row[e] == e for row in sequence) == most for e in range(8))


def test_of_tokens_that_like_an_expert_equally_it_takes_the_earlier():
    found = expert_choice(torch.zeros(1, 6, 4), MoeConfig(experts=4, top_k=1))
    assert found[0].tolist() == [[0, 1, 2, 3]] * 2 + [[-1] * 4] * 4


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
def test_sinkhorn_spreads_every_token_over_one_and_every_expert_over_its_even_share(scale: float):
    plan = sinkhorn_log_plan(logits(3, 64, scale=scale)).exp()
    torch.testing.assert_close(plan.sum(2), torch.ones(3, 64, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((3, 8), 8.0, dtype=torch.float64), rtol=1e-2, atol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_sinkhorn_equals_its_rounds_written_out_and_each_token_takes_its_best(scale: float):
    given = logits(2, 12, experts=6, scale=scale)
    plan, chosen = sinkhorn_log_plan(given).exp(), sinkhorn_choice(given, MoeConfig(experts=6, top_k=2))
    for b in range(2):
        expected = plan_by_loop(given[b].tolist())
        torch.testing.assert_close(plan[b], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        best = [sorted(range(6), key=lambda e, row=row: (-row[e], e))[:2] for row in expected]
        assert chosen[b].tolist() == best


def test_sinkhorn_evens_out_what_a_skewed_router_would_not():
    skewed = logits(1, 256) + torch.arange(8.0).flip(0)
    own, evened = skewed.topk(2).indices, sinkhorn_choice(skewed, MoeConfig(experts=8, top_k=2))
    worst, better = (ids.flatten().bincount(minlength=8).max().item() / 64 for ids in (own, evened))
    assert worst > 2.5
    assert better < 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_chosen_for_by_itself_however_a_batch_is_split(kind: str):
    given, moe = logits(4, 8), MoeConfig(experts=8, top_k=2)
    whole = KINDS[kind](given, moe)
    for size in (1, 2, 3):
        assert torch.equal(torch.cat([KINDS[kind](some, moe) for some in given.split(size)]), whole)


def of_kind(kind: str, **changes: Any) -> Router:
    return make_router(torch.float64, 3, router=kind, looks_ahead=True, experts=4, top_k=2, **changes)


WEIGHTS: list[dict[str, Any]] = [
    {"normalize": "chosen"},
    {"normalize": "none", "scale": 2.0},
    {"score": "sigmoid", "normalize": "none"},
    {"score": "sigmoid", "normalize": "all"},
    {"score": "softmax_chosen"},
]


@pytest.mark.parametrize("how", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_scores_by_a_loop_and_gradients_pass_gradcheck(kind: str, how: dict[str, Any]):
    router, h_TD, where = of_kind(kind, **how), tokens(12, 3, torch.float64).requires_grad_(), share(2, 6)
    weight = router.weight.detach().requires_grad_()
    rows = logits_by_loop(h_TD, weight, None)
    plain = [[[one.item() for one in row] for row in rows[b : b + 6]] for b in (0, 6)]
    if kind == "sinkhorn":
        plans = [row for one in plain for row in plan_by_loop(one)]
        ids = [sorted(range(4), key=lambda e, row=row: (-row[e], e))[:2] for row in plans]
    else:
        ids = [row for one in plain for row in taken_by_loop(one, 3)]
    assert any(max(row) >= 0 for row in ids)
    some = [t for t, row in enumerate(ids) if max(row) >= 0]  # a token that nobody took weighs nothing
    expected = torch.zeros(12, len(ids[0]), dtype=torch.float64)
    found, _ = routed_by_loop([rows[t] for t in some], [0.0] * 4, router.moe, [ids[t] for t in some])
    expected = expected.index_put((torch.tensor(some),), found)
    routing, _ = router(h_TD, where)
    assert routing.ids_TK.tolist() == ids
    torch.testing.assert_close(routing.weights_TK, expected, rtol=1e-12, atol=1e-12)

    def probs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional_call(router, {"weight": w}, (h, where))[0].weights_TK

    direction = torch.arange(expected.numel()).view_as(expected).cos().double()
    mine = torch.autograd.grad(probs(h_TD, weight), (h_TD, weight), direction)
    for a, b in zip(mine, torch.autograd.grad(expected, (h_TD, weight), direction), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(probs, (h_TD, weight))


def test_experts_that_choose_are_counted_with_exactly_even_loads_and_drop_nothing():
    router = of_kind("expert_choice", capacity_factor=1.0)
    router(tokens(24, 3, torch.float64), share(3, 8))
    assert router.load.counts_E.tolist() == [3 * 4] * 4
    assert router.load.dropped == 0
