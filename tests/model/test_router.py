"""What a router decides, and in which precision."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

from moefold.config.run import ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.routing.router_ops import router_topk
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.layout.axes import single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.router import Router
from moefold.train.assemble import default_dtype
from tests.support.models import share, with_moe_keys


def make_router(dtype: torch.dtype = torch.float32, hidden: int = 16, **moe: Any) -> Router:
    model = ModelConfig(
        hidden=hidden, init_std=0.5, moe=with_moe_keys(MoeConfig(), **{"experts": 8, "top_k": 3, **moe})
    )
    with default_dtype(dtype):
        router = Router(model, 0, BoundKernels(Facts("cpu", "fp32")), single_rank_world())
    initialise_parameters(router, seed=3)
    if router.bias is not None:
        with torch.no_grad():
            router.bias.copy_(torch.linspace(-0.7, 0.7, moe.get("experts", 8)))
    return router


def tokens(count: int, hidden: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).to(dtype)


def chosen_by_loop(worth: list[float], moe: MoeConfig) -> list[int]:
    """The best experts of the best groups, one comparison after another; of equals the lower number."""
    size, count = moe.experts // moe.router.groups, 1 if moe.router.group_score == "best" else 2
    members = [range(g * size, (g + 1) * size) for g in range(moe.router.groups)]
    values = [sum(sorted((worth[e] for e in group), reverse=True)[:count]) for group in members]
    groups = sorted(range(moe.router.groups), key=lambda g: (-values[g], g))[: moe.router.groups_chosen]
    allowed = [e for g in groups for e in members[g]]
    return sorted(allowed, key=lambda e: (-worth[e], e))[: moe.top_k]


def scores_by_loop(logits: list[torch.Tensor], moe: MoeConfig) -> list[torch.Tensor]:
    if moe.router.score == "sigmoid":
        return [1 / (1 + (-one).exp()) for one in logits]
    return [one.exp() / sum(other.exp() for other in logits) for one in logits]


def weights_by_loop(logits: list[torch.Tensor], ids: list[int], moe: MoeConfig) -> list[torch.Tensor]:
    """The weight of each chosen expert; -1 is none, and weighs nothing."""
    scores, taken = scores_by_loop(logits, moe), [e for e in ids if e >= 0]
    if moe.router.score == "softmax_chosen":
        scores = [one.exp() for one in logits]
    total: Any = {"chosen": sum(scores[e] for e in taken), "all": sum(scores), "none": 1.0}[moe.router.normalize]
    return [moe.router.scale * scores[e] / total if e >= 0 else 0 * scores[0] for e in ids]


def logits_by_loop(h_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[list[torch.Tensor]]:
    return [[(h * w).sum() + (bias[e] if bias is not None else 0.0) for e, w in enumerate(weight)] for h in h_TD]


def routed_by_loop(
    logits: list[list[torch.Tensor]], lean: list[float], moe: MoeConfig, imposed: list[list[int]] | None = None
) -> tuple[torch.Tensor, list[list[int]]]:
    """Weights and choices, token by token. `lean` is the selection bias."""
    weights, ids = [], []
    for t, row in enumerate(logits):
        by = row if moe.router.score == "softmax_chosen" else scores_by_loop(row, moe)
        worth = [value.item() + more for value, more in zip(by, lean, strict=True)]
        ids.append(imposed[t] if imposed else chosen_by_loop(worth, moe))
        weights.append(torch.stack(weights_by_loop(row, ids[-1], moe)))
    return torch.stack(weights), ids


GROUPS: list[dict[str, Any]] = [
    {},
    {"groups": 4, "groups_chosen": 2, "group_score": "best"},
    {"groups": 2, "groups_chosen": 1, "group_score": "best_two"},
    {"groups": 4, "groups_chosen": 3, "group_score": "best_two", "scale": 2.5},
]
SCORES = [(s, n) for s, n in itertools.product(("softmax", "sigmoid"), ("chosen", "all", "none"))]
VARIANTS: list[dict[str, Any]] = [
    {"score": score, "normalize": normalize, "biases": score == "sigmoid", **groups}
    for (score, normalize), groups in itertools.product([*SCORES, ("softmax_chosen", "chosen")], GROUPS)
]


def named(variant: Any) -> str:
    return " ".join(map(str, variant.values()))


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_every_variant_equals_a_loop_over_tokens_and_experts_and_its_gradients_pass_gradcheck(variant: dict[str, Any]):
    router, h_TD = make_router(torch.float64, hidden=3, **variant), tokens(4, 3, torch.float64).requires_grad_()
    lean = [0.6 * math.sin(7 * e) for e in range(8)]
    router.load.bias_E.copy_(torch.tensor(lean))
    where = share(2, 2)
    leaves = {name: p.detach().requires_grad_() for name, p in router.named_parameters()}

    def weights(h: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return functional_call(router, dict(zip(leaves, values, strict=True)), (h, where))[0].weights_TK

    logits = logits_by_loop(h_TD, leaves["weight"], leaves.get("bias"))
    expected, ids = routed_by_loop(logits, router.load.bias_E.tolist(), router.moe)
    routing, _ = router(h_TD, where)
    assert routing.ids_TK.tolist() == ids
    assert ids != routed_by_loop(logits, [0.0] * 8, router.moe)[1], "the selection bias has a say"
    torch.testing.assert_close(routing.weights_TK, expected, rtol=1e-12, atol=1e-12)

    wanted, direction = (h_TD, *leaves.values()), torch.arange(expected.numel()).view_as(expected).cos().double()
    mine = torch.autograd.grad(weights(*wanted), wanted, direction)
    for a, b in zip(mine, torch.autograd.grad(expected, wanted, direction), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(weights, wanted)


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
def test_scores_are_fp32_for_a_bf16_model(score: str):
    router = make_router(torch.bfloat16, aux_loss=0.1, score=score, biases=True)
    h_TD = tokens(12, dtype=torch.bfloat16)
    routing, aux = router(h_TD, share(2, 6))
    assert router.bias is not None
    assert router.weight.dtype == router.bias.dtype == torch.bfloat16
    assert routing.weights_TK.dtype == aux.dtype == torch.float32
    logits = torch.nn.functional.linear(h_TD.float(), router.weight.float(), router.bias.float())
    expected, ids, *_ = router_topk(logits, torch.zeros(8), RouterSpec(3, score))
    assert torch.equal(routing.weights_TK, expected)
    assert torch.equal(routing.ids_TK, ids)
    assert not torch.equal(expected, expected.bfloat16().float()), "bf16 could not hold them"


def test_scores_are_fp64_for_an_fp64_model():
    routing, aux = make_router(torch.float64, aux_loss=0.1)(tokens(12, dtype=torch.float64), share(2, 6))
    assert routing.weights_TK.dtype == aux.dtype == torch.float64


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
@pytest.mark.parametrize("experts", [4, 60, 256])
def test_ties_go_to_the_lower_expert(experts: int, score: str):
    flat, how = torch.zeros(5, experts), RouterSpec(3, score)
    assert router_topk(flat, torch.zeros(experts), how)[1].tolist() == [[0, 1, 2]] * 5
    some = flat.clone()
    some[:, [1, experts - 1]] = 2.0  # two above all others, tied with each other
    assert router_topk(some, torch.zeros(experts), how)[1].tolist() == [[1, experts - 1, 0]] * 5


@pytest.mark.parametrize("group_score", ["best", "best_two"])
def test_ties_between_groups_go_to_the_lower_group(group_score: str):
    how = RouterSpec(3, "sigmoid", groups=16, groups_chosen=2, group_score=group_score)
    assert router_topk(torch.zeros(5, 64), torch.zeros(64), how)[1].tolist() == [[0, 1, 2]] * 5
    some = torch.zeros(5, 64)
    some[:, [21, 41, 61]] = 2.0  # groups 5, 10 and 15 are tied: the first two are taken
    assert router_topk(some, torch.zeros(64), how)[1].tolist() == [[21, 41, 20]] * 5


def test_a_group_is_worth_its_best_expert_or_its_two_best_as_asked():
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])  # the best expert is in one group, the best two in the other
    one, two = (RouterSpec(1, "softmax_chosen", groups=2, groups_chosen=1, group_score=g) for g in ("best", "best_two"))
    assert router_topk(logits, torch.zeros(4), one)[1].item() == 0
    assert router_topk(logits, torch.zeros(4), two)[1].item() == 2


def test_no_token_leaves_the_groups_it_may_choose_from():
    router = make_router(groups=4, groups_chosen=2, score="sigmoid")
    ids = router(tokens(100), share(1, 100))[0].ids_TK
    assert all(len({e // 2 for e in row}) == 2 for row in ids.tolist())
    assert len({e // 2 for row in ids.tolist() for e in row}) == 4


def test_a_router_whose_weights_are_equal_sends_every_token_to_the_first_experts():
    router = make_router()
    with torch.no_grad():
        router.weight.zero_()
    assert router(tokens(9), share(1, 9))[0].ids_TK.tolist() == [[0, 1, 2]] * 9


@pytest.mark.parametrize("normalize", ["chosen", "none"])
def test_the_bias_changes_the_selection_and_never_the_weights(normalize: str):
    router, h_TD = make_router(normalize=normalize), tokens(50)
    before, _ = router(h_TD, share(1, 50))
    never = set(range(8)) - set(before.ids_TK[0].tolist())
    favoured = min(never)
    router.load.bias_E[favoured] = 10.0
    after, _ = router(h_TD, share(1, 50))
    assert (after.ids_TK[:, 0] == favoured).all()
    assert not torch.equal(before.ids_TK, after.ids_TK)
    scores = (h_TD @ router.weight.T).softmax(-1).gather(1, after.ids_TK)
    if normalize == "chosen":
        scores = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(after.weights_TK, scores, rtol=1e-6, atol=0)


def test_no_gradient_reaches_the_bias_and_the_routers_weight_gets_one():
    router = make_router(aux_loss=0.1)
    router.load.bias_E.requires_grad_()
    routing, aux = router(tokens(20), share(2, 10))
    (routing.weights_TK.square().sum() + aux).backward()
    assert router.load.bias_E.grad is None
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() > 0


def test_normalised_weights_sum_to_one_and_others_are_the_scores_themselves():
    h_TD = tokens(40)
    normalised, plain = (make_router(normalize=n)(h_TD, share(1, 40))[0] for n in ("chosen", "none"))
    torch.testing.assert_close(normalised.weights_TK.sum(1), torch.ones(40), rtol=1e-6, atol=0)
    scores = (h_TD @ make_router().weight.T).softmax(-1)
    assert torch.equal(plain.weights_TK, scores.gather(1, plain.ids_TK))
    assert (plain.weights_TK.sum(1) < 1).all()


def test_each_token_visits_different_experts_best_first():
    routing, _ = make_router()(tokens(40), share(1, 40))
    assert all(len(set(row)) == 3 for row in routing.ids_TK.tolist())
    assert (routing.weights_TK.diff(dim=1) <= 0).all()
