"""Several linear layers of one input: y = x W^T + b for each. (..., D) to (..., N)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.layout.gradient_sink import memory_for_gradient

OptionalTensor = torch.Tensor | None


@register_op
def linear(x: torch.Tensor, *layers: OptionalTensor) -> tuple[torch.Tensor, ...]:
    """`layers`: the weight and the bias, or None, of each in turn."""
    return tuple(F.linear(x, w_ND, b_N) for w_ND, b_N in weight_bias_pairs(layers))  # pyright: ignore[reportArgumentType]


def weight_bias_pairs(layers: tuple[OptionalTensor, ...]) -> list[tuple[OptionalTensor, OptionalTensor]]:
    return list(zip(layers[::2], layers[1::2], strict=True))


@linear.register_fast("fused_dgrad")
def _(x: torch.Tensor, *layers: OptionalTensor) -> tuple[torch.Tensor, ...]:
    return FusedDgradLinear.apply(x, *layers)  # pyright: ignore[reportReturnType]


class FusedDgradLinear(torch.autograd.Function):
    """The gradients that the layers give for their input are added by the products that make them, and those of weights
    are written in their places: no pass over memory for either."""

    @staticmethod
    def forward(ctx, x, *layers):
        ctx.save_for_backward(x)
        ctx.weights = layers[::2]  # themselves: they know where their gradients go
        return linear.reference(x, *layers)

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        rows_TD, dx_TD = x.flatten(0, -2), None
        found: list[OptionalTensor] = []
        for number, (dy, weight_ND) in enumerate(zip(gradients, ctx.weights, strict=True)):
            dy_TN = dy.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                dx_TD = dy_TN @ weight_ND if dx_TD is None else dx_TD.addmm_(dy_TN, weight_ND)
            found.append(torch.mm(dy_TN.T, rows_TD, out=memory_for_gradient(weight_ND)))
            found.append(dy_TN.sum(0) if ctx.needs_input_grad[2 * number + 2] else None)
        return None if dx_TD is None else dx_TD.view(x.shape), *found


@linear.register_cases
def _(device: str, dtype: torch.dtype):
    for lead, d, widths, biased in [
        ((5,), 8, (16,), True),
        ((2, 3), 16, (8, 24, 8), False),
        ((33,), 64, (64, 8), True),
        ((0,), 8, (4, 4), False),
    ]:
        layers: list[OptionalTensor] = []
        for i, n in enumerate(widths):
            bias = seeded_randn(device, dtype, n, seed=20 + i) if biased and i == 0 else None
            layers += [seeded_randn(device, dtype, n, d, seed=i + 1, scale=d**-0.5), bias]
        name = f"{'x'.join(map(str, lead))} rows of {d} to {', '.join(map(str, widths))}"
        yield KernelCase(name, (seeded_randn(device, dtype, *lead, d), *layers))
