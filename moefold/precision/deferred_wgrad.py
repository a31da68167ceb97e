"""Weight gradients that may wait: a backward gives the data gradient at once, and the weight gradient when asked.

    D   dx = dy W          what the stage before waits for
    W   dW = dy^T x        nobody waits for it: it fills a gap

While `held(queue)` is open, backward passes put their weight gradients into the queue as work to be done; otherwise
they do it at once. The results are the same, to the bit. For Linear and for the grouped products of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.linear import weight_bias_pairs
from moefold.precision.linear import set_linear_products

DeferredWork = Callable[[], None]
OPEN_QUEUES: list[list[DeferredWork]] = []  # the last is open; not thread-local: autograd runs on threads of its own


@contextmanager
def deferring_weight_grads(queue: list[DeferredWork]) -> Iterator[None]:
    OPEN_QUEUES.append(queue)
    try:
        yield
    finally:
        OPEN_QUEUES.pop()


def gradient_or_defer(weight: torch.Tensor, gradient: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """The weight's gradient now, or None and the promise to add it later, as a backward would."""
    if not OPEN_QUEUES:
        return gradient()

    def add_deferred_gradient() -> None:
        with torch.no_grad():
            found = gradient()
        torch.autograd.backward([weight], [found])

    OPEN_QUEUES[-1].append(add_deferred_gradient)
    return None


class SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias = weight, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, *gradients):
        (dy,), (x,) = gradients, ctx.saved_tensors
        rows, inputs = dy.flatten(0, -2), x.flatten(0, -2)
        d_weight = gradient_or_defer(ctx.weight, lambda: rows.T @ inputs)
        return dy @ ctx.weight.detach(), d_weight, rows.sum(0) if ctx.has_bias else None


class SplitGroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offsets, kernels):
        ctx.save_for_backward(x, offsets)
        ctx.weight, ctx.kernels = weight, kernels
        return kernels[grouped_gemm](x, weight, offsets)

    @staticmethod
    def backward(ctx, *gradients):
        (dy,), (x, offsets) = gradients, ctx.saved_tensors
        dy, kernels = dy.contiguous(), ctx.kernels
        d_weight = gradient_or_defer(ctx.weight, lambda: kernels[grouped_gemm_weight](dy, x, offsets))
        return kernels[grouped_gemm](dy, ctx.weight.detach().mT, offsets), d_weight, None, None


def splitting_kernels(kernels: BoundKernels) -> BoundKernels:
    """The same kernels, with grouped products whose weight gradients may wait: so no fused one for experts."""
    split = lambda x, w, offsets: SplitGroupedGemm.apply(x, w, offsets, kernels)  # noqa: E731
    fused_off = kernels.with_implementation(expert_mlp, expert_mlp.reference)
    return fused_off.with_implementation(grouped_gemm, split)


def split_weight_gradients(model: nn.Module) -> None:
    """Every linear layer's weight gradient may wait from now on."""
    set_linear_products(
        model, lambda x, *layers: tuple(SplitLinear.apply(x, *both) for both in weight_bias_pairs(layers))
    )  # pyright: ignore[reportArgumentType]
