"""The reference dispatcher against a plain loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.dispatch.base import Routing, RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.facts import Facts
from moefold.kernels.routing.expert_rows import gather_rows

FACTS = Facts("cpu", "fp64", hidden=4, ffn=4)
KERNELS = {
    "chosen": BoundKernels(FACTS),
    "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG]),
}
WIDTH = 4


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def choices(tokens: int, experts: int, k: int, seed: int, towards: float = 0.0) -> torch.Tensor:
    """K different experts for each token; the higher `towards`, the more tokens want the low numbers."""
    generator = torch.Generator().manual_seed(seed)
    liking = torch.rand(tokens, experts, generator=generator) - towards * torch.arange(experts)
    return liking.argsort(dim=1, descending=True)[:, :k]


def through_dispatcher(h_TD, weights_TK, ids_TK, matrix_EDD, kernels):
    """Each expert is a matrix, each row is scaled by its gate."""
    dispatcher = LocalDispatcher(RowPolicy(contiguous_placement(len(matrix_EDD))), kernels)
    receipt = dispatcher.plan(Routing(weights_TK, ids_TK))
    rows = dispatcher.dispatch(h_TD, receipt)
    x_RD = kernels[gather_rows](rows.source_ND, rows.order.index_R, rows.order.slots_NK)
    y_RD = kernels[grouped_gemm](x_RD, matrix_EDD, rows.order.ends_e) * rows.order.weight_R[:, None]
    return dispatcher.combine(y_RD, receipt)


def by_loop(h_TD, weights_TK, ids_TK, matrix_EDD):
    out = []
    for t in range(len(h_TD)):
        total = torch.zeros(WIDTH, dtype=h_TD.dtype)
        for k in range(ids_TK.shape[1]):
            total = total + weights_TK[t, k] * (matrix_EDD[ids_TK[t, k]] @ h_TD[t])
        out.append(total)
    return torch.stack(out) if out else h_TD * matrix_EDD.sum() * weights_TK.sum()


def agree(ids_TK: torch.Tensor, experts: int, kernels) -> None:
    tokens, k = ids_TK.shape
    inputs = numbers(tokens, WIDTH, seed=1), numbers(tokens, k, seed=2), numbers(experts, WIDTH, WIDTH, seed=3)
    mine = through_dispatcher(inputs[0], inputs[1], ids_TK, inputs[2], kernels)
    plain = by_loop(inputs[0], inputs[1], ids_TK, inputs[2])
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)
    direction = numbers(tokens, WIDTH, seed=4).detach()
    found, expected = (torch.autograd.grad(y, inputs, direction) for y in (mine, plain))
    for name, a, b in zip(("tokens", "gates", "experts"), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")


ROUTINGS = {
    "random": (choices(33, 8, 2, seed=1), 8),
    "skewed": (choices(33, 8, 2, seed=1, towards=0.3), 8),
    "all to one": (torch.full((17, 1), 3), 5),
    "all to the last": (torch.full((17, 1), 4), 5),
    "only two of eight": (torch.tensor([[6, 1]] * 9), 8),
    "every expert": (choices(7, 4, 4, seed=2), 4),
    "one token": (torch.tensor([[2, 0]]), 3),
    "one expert": (torch.zeros(5, 1, dtype=torch.int64), 1),
    "no tokens": (torch.empty(0, 2, dtype=torch.int64), 4),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatch_and_combine_equal_a_loop_over_tokens_and_experts(routing: str, kernels: str):
    agree(*ROUTINGS[routing], KERNELS[kernels])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_rows_of_an_expert_are_contiguous_and_in_the_order_of_their_tokens(routing: str):
    ids_TK, experts = ROUTINGS[routing]
    tokens, k = ids_TK.shape
    weights_TK = numbers(tokens, k, seed=2)
    dispatcher = LocalDispatcher(RowPolicy(contiguous_placement(experts)), KERNELS["chosen"])
    order = dispatcher.plan(Routing(weights_TK, ids_TK)).order
    assert not order.holes
    assert order.ends_e.dtype == torch.int32
    assert order.ends_e.shape == (experts,)
    start = 0
    for expert, end in enumerate(order.ends_e.tolist()):
        here = [(t, i) for t in range(tokens) for i in range(k) if ids_TK[t, i] == expert]
        assert order.index_R[start:end].tolist() == [t for t, _ in here], f"expert {expert}"
        assert order.weight_R[start:end].tolist() == [weights_TK[t, i].item() for t, i in here], f"expert {expert}"
        assert [order.slots_NK[t, i].item() for t, i in here] == list(range(start, end)), f"expert {expert}"
        start = end
    assert start == tokens * k == len(order.index_R)


@given(
    tokens=st.integers(0, 12),
    experts=st.integers(1, 9),
    k=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    towards=st.sampled_from([0.0, 0.2, 5.0]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_routing_of_any_size_equals_the_loop(tokens: int, experts: int, k: int, seed: int, towards: float):
    agree(choices(tokens, experts, min(k, experts), seed, towards), experts, KERNELS["chosen"])


def test_two_runs_give_the_same_bits():
    ids_TK, experts = ROUTINGS["random"]
    inputs = numbers(33, WIDTH, seed=1), numbers(33, 2, seed=2)
    matrix = numbers(experts, WIDTH, WIDTH, seed=3)
    first = through_dispatcher(*inputs, ids_TK, matrix, KERNELS["chosen"])
    again = through_dispatcher(*inputs, ids_TK, matrix, KERNELS["chosen"])
    assert torch.equal(first, again)


def test_nothing_travels_and_nothing_is_copied():
    h_TD = numbers(5, WIDTH, seed=1)
    dispatcher = LocalDispatcher(RowPolicy(contiguous_placement(3)), KERNELS["chosen"])
    receipt = dispatcher.plan(Routing(numbers(5, 1, seed=2), choices(5, 3, 1, seed=3)))
    assert dispatcher.dispatch(h_TD, receipt).source_ND is h_TD
