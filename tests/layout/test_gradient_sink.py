"""A sink lends the place of a first gradient, and shows the sum that later ones are added to."""

from __future__ import annotations

import torch

from moefold.layout.gradient_sink import attach_gradient_sink, memory_for_gradient, running_gradient_sum, sink_of


def test_a_weight_without_a_sink_gets_new_memory_and_has_no_sum():
    weight = torch.zeros(2, 3, requires_grad=True)
    assert sink_of(weight) is None
    assert running_gradient_sum(weight) is None
    memory = memory_for_gradient(weight)
    assert (memory.shape, memory.dtype) == (weight.shape, weight.dtype)


def test_place_and_sum_come_in_the_shape_of_the_parameter_or_of_a_view_of_it():
    weight, flat = torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(24)
    attach_gradient_sink(weight, lambda dtype: flat if dtype == torch.float32 else None, lambda: flat)
    view = weight.flatten(0, 1)
    sink = sink_of(view)
    assert sink is not None
    assert sink is sink_of(weight)
    assert sink.place(torch.bfloat16) is None
    for tensor in (weight, view):
        for memory in (memory_for_gradient(tensor), running_gradient_sum(tensor)):
            assert memory is not None
            assert memory.shape == tensor.shape
            assert memory.data_ptr() == flat.data_ptr()


def test_a_place_that_is_taken_is_replaced_by_new_memory():
    weight = torch.zeros(2, 3, requires_grad=True)
    attach_gradient_sink(weight, lambda dtype: None, lambda: None)
    assert memory_for_gradient(weight).shape == weight.shape
    assert running_gradient_sum(weight) is None
