"""The router's Triton kernels against their references, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.routing.expert_rows import arrange_rows
from moefold.kernels.routing.router_ops import router_topk
from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WAYS = [  # score and normalize; a rule says that weights of softmax_chosen are normalised over the chosen
    ("softmax_chosen", "chosen"),
    *product(("softmax", "sigmoid"), ("chosen", "all", "none")),
]


def both_ways(
    how: RouterSpec, t: int, e: int, imposed: torch.Tensor | None = None, span: TokenSpan | None = None
) -> None:
    """The kernel's choice, weights, sums by sequence and the gradient through all of them equal the reference's."""
    generator = torch.Generator().manual_seed(t + e)
    logits, bias = torch.randn(t, e, generator=generator).to(DEVICE), torch.randn(e, generator=generator) / 50
    outcomes, directions = [], None
    for name in ("reference", "triton"):
        leaf = logits.clone().requires_grad_()
        found = router_topk.implementations[name](leaf, bias.to(DEVICE), how, imposed, span)
        probs, ids, counts, shares, squares = found
        if directions is None:
            directions = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in (probs, shares, squares)]
        torch.autograd.backward((probs, shares, squares), directions)
        outcomes.append((ids, counts, probs, shares, squares, leaf.grad))
    for expected, got in zip(outcomes[0][:2], outcomes[1][:2], strict=True):
        assert torch.equal(got, expected), how
        assert got.dtype == expected.dtype == torch.int64
    for expected, got in zip(outcomes[0][2:], outcomes[1][2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{how}: {text}")


@pytest.mark.parametrize("groups", [(1, 1, "best_two"), (4, 2, "best_two"), (6, 2, "best"), (24, 3, "best_two")])
@pytest.mark.parametrize(("score", "normalize"), WAYS)
def test_every_way_of_choosing_and_its_gradient_equal_the_reference(
    score: str, normalize: str, groups: tuple[int, int, str]
):
    """24 experts: not a power of two, and groups of 6, of 4 and of one."""
    both_ways(RouterSpec(3, score, normalize, 2.5, *groups), t=21, e=24)


@pytest.mark.parametrize("normalize", ["chosen", "none"])
@pytest.mark.parametrize(("t", "e", "k"), [(1, 2, 1), (33, 8, 2), (20, 96, 8), (0, 4, 2), (5, 4, 4)])
def test_every_size_equals_the_reference(t: int, e: int, k: int, normalize: str):
    both_ways(RouterSpec(k, normalize=normalize), t, e)


@pytest.mark.parametrize(("score", "normalize"), WAYS)
def test_an_imposed_choice_with_places_left_empty_equals_the_reference(score: str, normalize: str):
    imposed = torch.tensor([[0, 5], [7, 2], [3, -1], [-1, 4], [-1, -1]], device=DEVICE)
    both_ways(RouterSpec(2, score, normalize, 2.5), t=5, e=8, imposed=imposed)


def test_an_imposed_choice_may_be_a_slice_of_another_tensor():
    order = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)).argsort().to(DEVICE)
    both_ways(RouterSpec(2), t=9, e=8, imposed=order[:, :2])


def test_where_experts_choose_a_token_has_a_place_for_each_of_them():
    chose = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)) < 0.3
    both_ways(RouterSpec(2), t=9, e=8, imposed=torch.where(chose, torch.arange(8), -1).to(DEVICE))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("span", [(1, 150), (3, 50), (37, 1), (2, 100, 30), (4, 60, 61), (2, 700, 590)])
def test_sums_are_those_of_sequences_whole_cut_and_absent(span: tuple[int, ...], score: str):
    """150 tokens, of more blocks than one, of parts of blocks, and of sequences of which other ranks hold all; 37 of a
    sequence each."""
    tokens = min(150, span[0] * span[1])
    both_ways(RouterSpec(2, score, scale=2.5), t=tokens, e=24, span=TokenSpan(*span))


def test_very_small_scores_keep_their_shares():
    """Sigmoids of logits this low are zero in fp32; their logs are not."""
    logits = torch.tensor([[-150.0, -151.0, -160.0, -200.0]], device=DEVICE)
    expected, got = (
        router_topk.implementations[name](logits, torch.zeros(4, device=DEVICE), RouterSpec(2, "sigmoid"))
        for name in ("reference", "triton")
    )
    torch.testing.assert_close(got[0], expected[0])
    assert 0.7 < float(got[0].max()) < 0.74


@pytest.mark.parametrize("read", [0, 3, 4], ids=["weights", "shares", "squares"])
def test_what_nobody_reads_has_no_part_in_the_gradient(read: int):
    logits, direction = torch.randn(9, 8, device=DEVICE), torch.randn(72, device=DEVICE)
    found = []
    for name in ("reference", "triton"):
        leaf = logits.clone().requires_grad_()
        out = router_topk.implementations[name](leaf, torch.zeros(8, device=DEVICE), RouterSpec(2))[read]
        out.backward(direction[: out.numel()].view(out.shape))
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_of_equally_good_experts_the_lower_numbers_are_chosen():
    ids = router_topk.implementations["triton"](
        torch.zeros(3, 8, device=DEVICE), torch.zeros(8, device=DEVICE), RouterSpec(3)
    )[1]
    assert ids.tolist() == [[0, 1, 2]] * 3


def test_arranging_rows_equals_the_reference_in_every_case():
    for case in arrange_rows.cases(DEVICE, torch.float32):
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
