"""The norms' Triton kernels, in Triton's interpreter where there is no GPU, against the references, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.norm import norm_triton
from moefold.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from moefold.kernels.registry import KernelCase
from moefold.layout.gradient_sink import attach_gradient_sink
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("op", [rmsnorm, add_rmsnorm], ids=lambda op: op.name)
def test_both_norms_equal_their_references_forward_and_backward(op):
    for case in op.cases(DEVICE, torch.float32):
        check(op, op.implementations["triton"], case, "fp32")


def test_more_rows_than_programs_have_the_gradients_of_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(norm_triton, "WARPS", 24)  # three programs
    x, added = (torch.randn(300, 96, generator=torch.Generator().manual_seed(i)) for i in range(2))
    case = KernelCase("300 rows", (x.to(DEVICE), added.to(DEVICE), torch.ones(96, device=DEVICE), 1e-6))
    check(add_rmsnorm, add_rmsnorm.implementations["triton"], case, "fp32")
    check(rmsnorm, rmsnorm.implementations["triton"], KernelCase("300 rows", case.inputs[1:]), "fp32")


def test_a_weights_gradient_is_written_where_it_shall_be():
    w = torch.ones(32, device=DEVICE, requires_grad=True)
    place = torch.full((32,), torch.nan, device=DEVICE)
    attach_gradient_sink(w, lambda dtype: place if dtype == w.dtype else None, lambda: None)
    y = rmsnorm.implementations["triton"](torch.randn(7, 32, device=DEVICE), w, 1e-6)
    (found,) = torch.autograd.grad(y, w, torch.ones_like(y))
    assert found.data_ptr() == place.data_ptr()
    assert found.isfinite().all()


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
