"""What a router decides, and in which precision."""

from __future__ import annotations

import pytest
import torch

from moefold.config.run import ModelConfig, MoeConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.kernels.router_topk import router_topk
from moefold.layout.axes import alone
from moefold.model.initialise import initialise
from moefold.model.moe.router import Router
from moefold.train.assemble import default_dtype
from tests.support.models import share


def make_router(dtype: torch.dtype = torch.float32, hidden: int = 16, **moe: object) -> Router:
    model = ModelConfig(hidden=hidden, init_std=0.5, moe=MoeConfig(experts=8, top_k=3, **moe))  # pyright: ignore[reportArgumentType]
    with default_dtype(dtype):
        router = Router(model, bind(Facts("cpu", "fp32")), alone())
    initialise(router, seed=3)
    return router


def tokens(count: int, hidden: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_scores_are_fp32_for_a_bf16_model():
    router, h_TD = make_router(torch.bfloat16, aux_loss=0.1), tokens(12, dtype=torch.bfloat16)
    routing, aux = router(h_TD, share(2, 6))
    assert router.weight.dtype == torch.bfloat16
    assert routing.probs_TK.dtype == aux.dtype == torch.float32
    logits = h_TD.float() @ router.weight.float().T
    expected, ids, _ = router_topk(logits, torch.zeros(8), 3, True)
    assert torch.equal(routing.probs_TK, expected)
    assert torch.equal(routing.ids_TK, ids)


def test_scores_are_fp64_for_an_fp64_model():
    routing, aux = make_router(torch.float64, aux_loss=0.1)(tokens(12, dtype=torch.float64), share(2, 6))
    assert routing.probs_TK.dtype == aux.dtype == torch.float64


@pytest.mark.parametrize("experts", [4, 60, 256])
def test_ties_go_to_the_lower_expert(experts: int):
    flat = torch.zeros(5, experts)
    assert router_topk(flat, torch.zeros(experts), 3, True)[1].tolist() == [[0, 1, 2]] * 5
    some = flat.clone()
    some[:, [1, experts - 1]] = 2.0  # two above all others, tied with each other
    assert router_topk(some, torch.zeros(experts), 3, True)[1].tolist() == [[1, experts - 1, 0]] * 5


def test_a_router_whose_weights_are_equal_sends_every_token_to_the_first_experts():
    router = make_router()
    with torch.no_grad():
        router.weight.zero_()
    assert router(tokens(9), share(1, 9))[0].ids_TK.tolist() == [[0, 1, 2]] * 9


@pytest.mark.parametrize("normalize", [True, False])
def test_the_bias_changes_the_selection_and_never_the_weights(normalize: bool):
    router, h_TD = make_router(normalize_top_k=normalize), tokens(50)
    before, _ = router(h_TD, share(1, 50))
    never = set(range(8)) - set(before.ids_TK[0].tolist())
    favoured = min(never)
    router.load.bias_E[favoured] = 10.0
    after, _ = router(h_TD, share(1, 50))
    assert (after.ids_TK[:, 0] == favoured).all()
    assert not torch.equal(before.ids_TK, after.ids_TK)
    scores = (h_TD @ router.weight.T).softmax(-1).gather(1, after.ids_TK)
    if normalize:
        scores = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(after.probs_TK, scores, rtol=1e-6, atol=0)


def test_no_gradient_reaches_the_bias_and_the_routers_weight_gets_one():
    router = make_router(aux_loss=0.1)
    router.load.bias_E.requires_grad_()
    routing, aux = router(tokens(20), share(2, 10))
    (routing.probs_TK.square().sum() + aux).backward()
    assert router.load.bias_E.grad is None
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() > 0


def test_normalised_weights_sum_to_one_and_others_are_the_scores_themselves():
    h_TD = tokens(40)
    normalised, plain = (make_router(normalize_top_k=n)(h_TD, share(1, 40))[0] for n in (True, False))
    torch.testing.assert_close(normalised.probs_TK.sum(1), torch.ones(40), rtol=1e-6, atol=0)
    scores = (h_TD @ make_router().weight.T).softmax(-1)
    assert torch.equal(plain.probs_TK, scores.gather(1, plain.ids_TK))
    assert (plain.probs_TK.sum(1) < 1).all()


def test_each_token_visits_different_experts_best_first():
    routing, _ = make_router()(tokens(40), share(1, 40))
    assert all(len(set(row)) == 3 for row in routing.ids_TK.tolist())
    assert (routing.probs_TK.diff(dim=1) <= 0).all()
