"""Counting in Triton, in its interpreter where there is no GPU, against the reference, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.tally import tally
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("number", range(5))
def test_counts_sums_and_the_gradient_equal_the_references(number: int):
    assert tally.make_cases is not None
    case = list(tally.make_cases(DEVICE, torch.float32))[number]
    check(tally, tally.implementations["triton"], case, "fp32")


def test_a_sum_that_nobody_reads_has_no_gradient():
    shares = torch.rand(6, 4, device=DEVICE, requires_grad=True)
    sums, _ = tally.implementations["triton"](shares, torch.zeros(6, 1, dtype=torch.int64, device=DEVICE), 0, 3, 2)
    (gradient,) = torch.autograd.grad((shares * 2).sum() + sums.sum() * 0, shares)
    assert torch.equal(gradient, torch.full_like(shares, 2.0))
