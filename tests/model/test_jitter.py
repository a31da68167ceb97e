"""Noise on the router's input: bounded, even, and a matter of the token alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from moefold.layout.axes import Axis
from moefold.model.moe.jitter import multiply_by_jitter
from moefold.model.moe.router import Router
from moefold.model.token_layout import TokenShard
from tests.layout.test_counter_random import noise_by_hand
from tests.model.test_router import make_router, tokens
from tests.support.models import share


def part(
    sequences: int, length: int, first: int = 0, cp: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1)
) -> TokenShard:
    axes = (Axis(name, tuple(range(size)), index) for name, (index, size) in (("cp", cp), ("tp", tp)))
    return TokenShard(sequences, length, *axes, torch.device("cpu"), first)


def test_no_element_is_changed_by_more_than_the_size_and_all_are_changed():
    h_TD = tokens(50, 16, torch.float64)
    ratio = multiply_by_jitter(h_TD, 0.25, torch.arange(50), 0) / h_TD
    assert ((ratio - 1).abs() <= 0.25 + 1e-12).all()
    assert (ratio != 1).all()
    assert (ratio - 1).abs().max() > 0.24


def weights(router: Router, h_BSD: torch.Tensor, where: TokenShard) -> torch.Tensor:
    return router.logits(where.slice_for_rank(h_BSD), where)


@pytest.mark.parametrize(("cp", "tp", "size"), list(itertools.product((1, 2), (1, 2), (1, 2, 4))))
def test_a_token_has_the_same_noise_on_any_layout_and_in_any_microbatch(cp: int, tp: int, size: int):
    router, h_BSD = make_router(torch.float64, jitter=0.2), tokens(4 * 8, dtype=torch.float64).view(4, 8, 16)
    whole, first = weights(router, h_BSD, part(4, 8, first=12)), 12
    for c, t, start in itertools.product(range(cp), range(tp), range(0, 4, size)):
        where = part(size, 8, first + start, (c, cp), (t, tp))
        mine = weights(router, h_BSD[start : start + size], where)
        torch.testing.assert_close(mine, whole[where.token_number_T - first * 8], rtol=1e-14, atol=1e-14)


def test_another_layer_and_another_batch_have_other_noise():
    h_TD, router = tokens(8), make_router(jitter=0.2)
    here, later = router.logits(h_TD, part(1, 8)), router.logits(h_TD, part(1, 8, first=1))
    assert not torch.equal(here, later)
    router.layer = 1
    assert not torch.equal(here, router.logits(h_TD, part(1, 8)))


def test_there_is_no_noise_in_eval_mode_and_none_without_jitter():
    h_TD, router, still = tokens(8), make_router(jitter=0.2), make_router()
    assert not torch.equal(router(h_TD, share(1, 8))[0].weights_TK, still(h_TD, share(1, 8))[0].weights_TK)
    router.eval()
    assert torch.equal(router(h_TD, share(1, 8))[0].weights_TK, still(h_TD, share(1, 8))[0].weights_TK)


def test_a_router_with_jitter_is_a_router_of_the_changed_input_and_its_gradients_pass_gradcheck():
    router, still = (make_router(torch.float64, 3, jitter=jitter, top_k=2) for jitter in (0.2, 0.0))
    h_TD, where = tokens(4, 3, torch.float64).requires_grad_(), part(2, 2, first=5)
    numbers = range(10, 14)
    by_hand = torch.tensor([[noise_by_hand(n, d, 0) for d in range(3)] for n in numbers], dtype=torch.float32)
    changed = (1 + 0.2 * by_hand).double()  # the factor is fp32 for any model
    mine, plain = router(h_TD, where)[0], still(h_TD * changed, where)[0]
    assert torch.equal(mine.ids_TK, plain.ids_TK)
    torch.testing.assert_close(mine.weights_TK, plain.weights_TK, rtol=1e-12, atol=1e-12)

    def probs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional_call(router, {"weight": w}, (h, where))[0].weights_TK

    assert torch.autograd.gradcheck(probs, (h_TD, router.weight.detach().requires_grad_()))


def test_a_router_that_is_computed_again_has_the_same_noise():
    found: list[Any] = []
    for again in (False, True):
        router, h_TD = make_router(torch.float64, jitter=0.2, aux_loss=0.1), tokens(8, dtype=torch.float64)
        h_TD.requires_grad_()
        torch.manual_seed(7)
        if again:
            routing, aux = checkpoint(router, h_TD, share(2, 4), use_reentrant=False, preserve_rng_state=False)
        else:
            routing, aux = router(h_TD, share(2, 4))
        torch.manual_seed(8)  # the state of any generator does not matter
        found.append(torch.autograd.grad(routing.weights_TK.square().sum() + aux, (h_TD, router.weight)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
