"""The norms' Triton kernels, in Triton's interpreter where there is no GPU, against the references, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels import norm_kernels
from moefold.kernels.add_rmsnorm import add_rmsnorm
from moefold.kernels.rmsnorm import rmsnorm
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("op", [rmsnorm, add_rmsnorm], ids=lambda op: op.name)
@pytest.mark.parametrize("number", range(4))
def test_both_norms_equal_their_references_forward_and_backward(op, number: int):
    assert op.make_cases is not None
    check(op, op.implementations["triton"], list(op.make_cases(DEVICE, torch.float32))[number], "fp32")


def test_the_weights_gradient_of_more_rows_than_programs_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(norm_kernels, "WARPS", 24)  # three programs
    x, dy = (torch.randn(300, 96, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2))
    w = torch.ones(96, device=DEVICE, requires_grad=True)
    rmsnorm(x, w, 1e-6).backward(dy)
    _, _, inverse = norm_kernels.forward(x, None, w.detach(), 1e-6)
    _, dw = norm_kernels.backward(dy, None, x, w.detach(), inverse, None)
    torch.testing.assert_close(dw, w.grad, rtol=1e-5, atol=1e-5)


def test_a_sum_that_nobody_norms_or_nobody_else_reads_has_its_gradient_all_the_same():
    inputs = [torch.randn(7, 32, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    for used in (0, 1, 2):
        found = []
        for implementation in ("reference", "triton"):
            x, added = (t.clone().requires_grad_() for t in inputs)
            w = torch.ones(32, device=DEVICE, requires_grad=True)
            add_rmsnorm.implementations[implementation](x, added, w, 1e-6)[used].square().sum().backward()
            assert torch.equal(x.grad, added.grad)  # pyright: ignore[reportArgumentType]
            found.append(x.grad)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
