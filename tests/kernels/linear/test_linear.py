"""Products that add up the gradients of one input: they run on any device, though a CPU's runs do not choose them."""

from __future__ import annotations

import torch

from moefold.kernels.linear.linear import linear
from moefold.layout.gradient_sink import attach_gradient_sink
from tests.kernels.test_every_op import check

adding = linear.implementations["fused_dgrad"]


def test_what_adds_equals_the_reference_in_every_case():
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        for case in linear.cases("cpu", dtype):
            check(linear, adding, case, name)


def test_a_weights_gradient_is_written_where_it_shall_be_though_the_weight_is_a_view():
    weight, x = torch.randn(2, 3, 4).requires_grad_(), torch.randn(5, 4)
    place = torch.full((24,), torch.nan)
    attach_gradient_sink(weight, lambda dtype: place if dtype == weight.dtype else None, lambda: None)
    (y,) = adding(x, [(weight.flatten(0, 1), None)])
    y.backward(dy := torch.randn(5, 6))
    assert weight.grad is not None
    assert weight.grad.data_ptr() == place.data_ptr()
    torch.testing.assert_close(weight.grad, (dy.T @ x).view(2, 3, 4))


def test_an_input_that_wants_no_gradient_gets_none():
    weights = [torch.randn(3, 4).requires_grad_() for _ in range(2)]
    a, b = adding(torch.randn(5, 4), [(weight, None) for weight in weights])
    (a + b).sum().backward()
    assert all(weight.grad is not None for weight in weights)
