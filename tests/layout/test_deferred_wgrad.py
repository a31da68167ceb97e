"""Weight gradients that wait are the ones that do not, to the bit, and come when asked and not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import EXPERT_ROW_COUNTS, grouped_gemm
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product import Adapter, Recipe, WeightAndBias
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.deferred_wgrad import (
    OPEN_QUEUES,
    DeferredWork,
    deferring_weight_grads,
    deliver_gradient,
    gradient_or_defer,
)
from moefold.precision.linear import GroupedLinear, Linear
from moefold.train.assemble import default_dtype

KERNELS = {
    dtype: BoundKernels(Facts("cpu", name, hidden=16, ffn=16))
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32))
}
SHAPES: list[tuple[tuple[int, ...], bool]] = [((5,), False), ((5,), True), ((2, 6), False), ((3, 2, 4), True)]


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_autograd(
    x: torch.Tensor, layers: Sequence[WeightAndBias], recipe: Recipe, adapters: Sequence[Adapter] = ()
) -> tuple[torch.Tensor, ...]:
    """What torch differentiates by itself: the judge."""
    return tuple(F.linear(x, weight, bias) for weight, bias in layers)


def linear(outputs: tuple[int, ...], bias: bool, dtype: torch.dtype, judge: bool = False) -> Linear:
    with default_dtype(dtype):
        made = Linear(single_rank_world(), 7, *outputs, bias=bias, std=1.0)
    for i, parameter in enumerate(declared_parameters(made)):
        parameter.tensor.data.copy_(numbers(*parameter.tensor.shape, seed=i, dtype=dtype))
    if judge:
        made.multiply_layers = by_autograd
    return made


def backward(module: nn.Module, x: torch.Tensor, queue: list[DeferredWork] | None) -> torch.Tensor:
    """Run forward and backward; returns x's gradient."""
    x = x.detach().requires_grad_()
    y = module(x)
    dy = numbers(*y.shape, seed=9, dtype=y.dtype)
    if queue is None:
        y.backward(dy)
    else:
        with deferring_weight_grads(queue):
            y.backward(dy)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(11,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(("outputs", "bias"), SHAPES, ids=str)
def test_a_linear_layer_has_the_bits_of_autograd_at_once_and_later(
    outputs: tuple[int, ...], bias: bool, lead: tuple[int, ...], dtype: torch.dtype
):
    x = numbers(*lead, 7, seed=5, dtype=dtype)
    plain, now, later = (linear(outputs, bias, dtype, judge) for judge in (True, False, False))
    queue: list[DeferredWork] = []
    dx = [backward(plain, x, None), backward(now, x, None), backward(later, x, queue)]
    assert torch.equal(plain(x), later(x))
    assert torch.equal(dx[0], dx[1])
    assert torch.equal(dx[0], dx[2])
    assert now.weight.grad is not None
    assert later.weight.grad is None, "nothing is added before it is asked for"
    assert len(queue) == 1
    queue.pop()()
    for a, b, c in zip(plain.parameters(), now.parameters(), later.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(a.grad, c.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXPERT_ROW_COUNTS)
def test_a_grouped_product_has_the_bits_of_autograd_with_empty_experts_too(name: str, dtype: torch.dtype):
    counts = EXPERT_ROW_COUNTS[name]
    offsets = torch.tensor(counts).cumsum(0).int()
    kernels = KERNELS[dtype]
    plain, split = kernels[grouped_gemm], GroupedLinear(kernels)
    found: list[tuple[Any, Any, Any]] = []
    for product, wait in ((plain, False), (split, False), (split, True)):
        x = numbers(sum(counts), 16, seed=1, dtype=dtype).requires_grad_()
        w = numbers(len(counts), 32, 16, seed=2, dtype=dtype).requires_grad_()
        y = product(x, w, offsets)
        queue: list[DeferredWork] = []
        if wait:
            with deferring_weight_grads(queue):
                y.backward(numbers(*y.shape, seed=3, dtype=dtype))
            assert w.grad is None
            assert len(queue) == 1
            queue.pop()()
        else:
            y.backward(numbers(*y.shape, seed=3, dtype=dtype))
        found.append((y.detach(), x.grad, w.grad))
    for other in found[1:]:
        for right, mine in zip(found[0], other, strict=True):
            assert torch.equal(right, mine)
    for expert, count in enumerate(counts):
        if count == 0:
            assert not found[0][2][expert].any(), "an empty expert has the gradient zero"


def test_a_waiting_gradient_arrives_through_hooks_as_a_backward_would_bring_it():
    module, arrived = linear((2, 6), False, torch.float64), []
    module.weight.register_post_accumulate_grad_hook(
        lambda p: arrived.append(p.grad.clone()) if p.grad is not None else None
    )
    queue: list[DeferredWork] = []
    backward(module, numbers(4, 7, seed=5, dtype=torch.float64), queue)
    assert not arrived
    queue.pop()()
    assert len(arrived) == 1
    assert torch.equal(arrived[0], module.weight.grad)


def test_microbatches_add_up_in_the_order_in_which_their_gradients_are_asked_for():
    xs = [numbers(4, 7, seed=i, dtype=torch.float64) for i in range(3)]
    plain, later = (linear((5,), True, torch.float64, judge) for judge in (True, False))
    queue: list[DeferredWork] = []
    for x in xs:
        backward(plain, x, None)
    for x in xs:
        backward(later, x, queue)
    for work in queue:
        work()
    assert torch.equal(plain.weight.grad, later.weight.grad)
    assert torch.equal(plain.bias.grad, later.bias.grad)  # pyright: ignore[reportOptionalMemberAccess]


def test_a_waiting_gradient_is_that_of_the_forward_though_the_input_is_gone():
    module = linear((5,), False, torch.float64)
    x = numbers(4, 7, seed=5, dtype=torch.float64)
    queue: list[DeferredWork] = []
    backward(module, x, queue)
    right = numbers(4, 5, seed=9, dtype=torch.float64).T @ x
    backward(module, numbers(4, 7, seed=6, dtype=torch.float64), [])
    queue.pop()()
    assert torch.equal(module.weight.grad, right)


def test_a_queue_is_closed_by_its_block_even_when_that_fails():
    with pytest.raises(ZeroDivisionError), deferring_weight_grads([]):
        _ = 1 / 0
    assert not OPEN_QUEUES
    module = linear((5,), False, torch.float64)
    backward(module, numbers(4, 7, seed=5, dtype=torch.float64), None)
    assert module.weight.grad is not None


def test_the_innermost_open_queue_gets_the_work():
    module, outer, inner = linear((5,), False, torch.float64), [], []
    x = numbers(4, 7, seed=5, dtype=torch.float64)
    with deferring_weight_grads(outer):
        with deferring_weight_grads(inner):
            module(x).sum().backward()
        module(x).sum().backward()
    assert (len(outer), len(inner)) == (1, 1)


@pytest.mark.parametrize("view", [False, True])
def test_hooks_run_for_a_gradient_that_was_added_in_place_now_and_later(view: bool):
    """A product that adds to a running sum gives autograd no gradient; hooks that count gradients run all the same."""
    weight = torch.ones(2, 3, 4).requires_grad_()
    seen: list[object] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    tensor = weight.flatten(0, 1) if view else weight
    queue: list[DeferredWork] = []
    with deferring_weight_grads(queue):
        assert gradient_or_defer(tensor, lambda: None) is None
    assert not seen
    queue.pop()()
    deliver_gradient(tensor, None)
    assert seen == [None, None]
    deliver_gradient(tensor, torch.ones_like(tensor))
    assert torch.equal(weight.grad, torch.ones(2, 3, 4))  # pyright: ignore[reportArgumentType]
