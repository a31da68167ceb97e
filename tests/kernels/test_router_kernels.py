"""The router's Triton kernels against their references, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.arrange_rows import arrange_rows
from moefold.kernels.router_topk import Choosing, router_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("normalize", ["chosen", "none"])
@pytest.mark.parametrize(("t", "e", "k"), [(1, 2, 1), (33, 8, 2), (20, 96, 8), (0, 4, 2), (5, 4, 4)])
def test_choosing_and_its_gradient_equal_the_reference(t: int, e: int, k: int, normalize: str):
    generator = torch.Generator().manual_seed(t)
    logits, dscores = (torch.randn(t, e, generator=generator).to(DEVICE) for _ in range(2))
    dprobs, bias = (
        torch.randn(t, k, generator=generator).to(DEVICE),
        torch.randn(e, generator=generator).to(DEVICE) / 50,
    )
    outcomes = []
    for name in ("reference", "triton"):
        leaf = logits.clone().requires_grad_()
        probs, ids, scores = router_topk.implementations[name](leaf, bias, Choosing(k, normalize=normalize))
        torch.autograd.backward((probs, scores), (dprobs, dscores))
        outcomes.append((ids, probs, scores, leaf.grad))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    for expected, got in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_of_equally_good_experts_the_lower_numbers_are_chosen():
    _, ids, _ = router_topk.implementations["triton"](
        torch.zeros(3, 8, device=DEVICE), torch.zeros(8, device=DEVICE), Choosing(3)
    )
    assert ids.tolist() == [[0, 1, 2]] * 3


def test_arranging_rows_equals_the_reference_in_every_case():
    assert arrange_rows.make_cases is not None
    for case in arrange_rows.make_cases(DEVICE, torch.float32):
        ids, gates, experts = case.inputs
        leaves = [gates.clone().requires_grad_() for _ in range(2)]
        expected, got = (
            arrange_rows.implementations[name](ids, leaf, experts)
            for name, leaf in zip(("reference", "triton"), leaves, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), case.name
        direction = torch.randn_like(expected[2])
        for out in (expected, got):
            torch.autograd.backward(out[2], direction)
        assert torch.equal(leaves[0].grad, leaves[1].grad), case.name  # pyright: ignore[reportArgumentType]
