"""All linear products as one autograd function: number format x weight gradient now or later x where it is written.

    y  = x W^T + b      forward
    dx = dy W           data gradient
    dW = dy^T x         weight gradient, now or deferred (layout/deferred_wgrad.py)

A recipe turns tensors into operands: the plain recipe leaves them as they are, a low-precision recipe quantises them.
Products multiply operands. Dense: x (T, D), W (N, D). Grouped: x (R, D) sorted by expert, W (E, N, D), the rows of
expert e end before `ends_E[e]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch

from moefold.layout.deferred_wgrad import gradient_or_defer

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
KeptOperand = Literal["rows", "columns", "both"]


class Operand(NamedTuple):
    """A matrix as a product reads it. `scales` has as many dims as `rows`; each scale is that of a block of rows.
    `columns` is the same matrix quantised along its other dim, for the weight gradient."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    columns: Operand | None = None

    def dequantised(self) -> torch.Tensor:
        if self.scales is None:
            return self.rows
        scales = self.scales
        for dim, size in enumerate(self.rows.shape):
            block = -(-size // scales.shape[dim])
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
        return self.rows.to(scales.dtype) * scales

    def along_columns(self) -> Operand:
        """The operand of the weight gradient."""
        return self if self.columns is None else self.columns


class Recipe(Protocol):
    """The number format of a product's operands. `keeps`: the part of the input's operand that forward saves for the
    weight gradient. `row_multiple`: each expert's rows are to be padded to a multiple of it."""

    name: str
    keeps: KeptOperand
    row_multiple: int

    def input(self, x: torch.Tensor) -> Operand: ...

    def weight(self, w: torch.Tensor) -> Operand:
        """Asked for in forward and again in backward: a recipe may cache it until the optimizer moves the weight."""
        ...

    def gradient(self, dy: torch.Tensor) -> Operand: ...

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that outlive a step, such as a delayed maximum, by name: checkpoints list them."""
        ...


class PlainRecipe:
    """Operands in the model's own precision."""

    name = "plain"
    keeps: KeptOperand = "rows"
    row_multiple = 1

    def input(self, x: torch.Tensor) -> Operand:
        return Operand(x)

    def weight(self, w: torch.Tensor) -> Operand:
        return Operand(w)

    def gradient(self, dy: torch.Tensor) -> Operand:
        return Operand(dy)

    def state(self) -> dict[str, torch.Tensor]:
        return {}


PLAIN = PlainRecipe()


class Products(Protocol):
    """The three products. `ends_E` is None for dense ones."""

    def forward(
        self, x: Operand, w: Operand, bias: torch.Tensor | None, ends_E: torch.Tensor | None
    ) -> torch.Tensor: ...

    def data(self, dy: Operand, w: Operand, ends_E: torch.Tensor | None, into: torch.Tensor | None) -> torch.Tensor:
        """Given `into`, the gradient is added to that tensor, which is returned."""
        ...

    def weight(self, dy: Operand, x: Operand, weight: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of `weight`, which may be written to the place that its sink lends; or None if the gradient was
        added to the sink's running sum."""
        ...


def multiply(
    x: torch.Tensor,
    layers: Sequence[WeightAndBias],
    recipe: Recipe,
    products: Products,
    ends_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The products of one input with the weights of several layers. Their input gradients are summed inside."""
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers]
    call = ProductCall(recipe, products, len(layers))
    return LinearProduct.apply(call, ends_E, x, *weights, *biases)  # pyright: ignore[reportReturnType]


class ProductCall(NamedTuple):
    recipe: Recipe
    products: Products
    layers: int


class LinearProduct(torch.autograd.Function):
    """Saves the operand of the input. Weights are kept as the tensors they are, not as saved tensors: the gradient sink
    is an attribute of the Parameter object."""

    @staticmethod
    def forward(ctx: Any, call: ProductCall, ends_E: torch.Tensor | None, x: torch.Tensor, *tensors: Any) -> Any:
        recipe, products, layers = call
        ctx.call, ctx.x_shape, ctx.x_dtype = call, x.shape, x.dtype
        ctx.weights, biases = tensors[:layers], tensors[layers:]
        x_operand = recipe.input(x.flatten(0, -2))
        weight_gradients = ctx.needs_input_grad[3 : 3 + layers]
        kept = kept_operand(x_operand, recipe.keeps) if any(weight_gradients) else None
        ctx.save_for_backward(ends_E, *pack_operand(kept))
        outputs: list[torch.Tensor] = []
        for weight, bias in zip(ctx.weights, biases, strict=True):
            y = products.forward(x_operand, recipe.weight(weight), bias, ends_E)
            outputs.append(y.to(x.dtype).view(*x.shape[:-1], y.shape[-1]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        recipe, products, layers = ctx.call
        ends_E, *packed = ctx.saved_tensors
        x_operand = unpack_operand(*packed)
        _, _, needs_dx, *needed = ctx.needs_input_grad
        dx: torch.Tensor | None = None
        d_weights: list[torch.Tensor | None] = [None] * layers
        d_biases: list[torch.Tensor | None] = [None] * layers
        for i, weight in enumerate(ctx.weights):
            dy = gradients[i].flatten(0, -2)
            dy_operand = recipe.gradient(dy)
            if needs_dx:
                dx = products.data(dy_operand, recipe.weight(weight), ends_E, dx)
            if needed[i]:
                wgrad = partial(products.weight, dy_operand, x_operand, weight, ends_E)
                d_weights[i] = gradient_or_defer(weight, wgrad)
            if needed[layers + i]:
                d_biases[i] = dy.sum(0)
        if dx is not None:
            dx = dx.to(ctx.x_dtype).view(ctx.x_shape)
        return None, None, dx, *d_weights, *d_biases


def kept_operand(x: Operand, keeps: KeptOperand) -> Operand:
    """The part of an input's operand that backward needs."""
    if keeps == "rows":
        return x._replace(columns=None)
    return x.along_columns() if keeps == "columns" else x


def pack_operand(operand: Operand | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors of an operand, as autograd saves them."""
    if operand is None:
        return None, None, None, None
    columns = operand.columns
    if columns is None:
        return operand.rows, operand.scales, None, None
    return operand.rows, operand.scales, columns.rows, columns.scales


def unpack_operand(
    rows: torch.Tensor | None,
    scales: torch.Tensor | None,
    column_rows: torch.Tensor | None,
    column_scales: torch.Tensor | None,
) -> Operand | None:
    if rows is None:
        return None
    columns = None if column_rows is None else Operand(column_rows, column_scales)
    return Operand(rows, scales, columns)
