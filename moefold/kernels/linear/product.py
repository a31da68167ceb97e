"""All linear products as one autograd function: number format x weight gradient now or later x where it is written.

    y  = x W^T + b      forward
    dx = dy W           data gradient
    dW = dy^T x         weight gradient, now or deferred (layout/deferred_wgrad.py)

A recipe turns tensors into operands: the plain recipe leaves them as they are, a low-precision recipe quantises them.
Products multiply operands. Dense: x (T, D), W (N, D). Grouped: x (R, D) sorted by expert, W (E, N, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.layout.deferred_wgrad import gradient_or_defer

WeightAndBias = tuple[Tensor, Tensor | None]
KeptOperand = Literal["rows", "columns", "both"]


class Operand(NamedTuple):
    """A matrix as a product reads it. `scales` has as many dims as `rows`; each scale is that of a block of rows.
    `columns` is the same matrix quantised along its other dim, for the weight gradient."""

    rows: Tensor
    scales: Tensor | None = None
    columns: Operand | None = None

    def dequantised(self) -> Tensor:
        if self.scales is None:
            return self.rows
        scales = self.scales
        for dim, size in enumerate(self.rows.shape):
            block = -(-size // scales.shape[dim])
            scales = scales.repeat_interleave(block, dim)
            scales = scales.narrow(dim, 0, size)  # the last block may be cut short
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

    def input(self, x: Tensor) -> Operand: ...

    def weight(self, w: Tensor) -> Operand:
        """Asked for in forward and again in backward: a recipe may cache it until the optimizer moves the weight."""
        ...

    def gradient(self, dy: Tensor) -> Operand: ...

    def state(self) -> dict[str, Tensor]:
        """Tensors that outlive a step, such as a delayed maximum, by name: checkpoints list them."""
        ...


class PlainRecipe:
    """Operands in the model's own precision."""

    name = "plain"
    keeps: KeptOperand = "rows"
    row_multiple = 1

    def input(self, x: Tensor) -> Operand:
        return Operand(x)

    def weight(self, w: Tensor) -> Operand:
        return Operand(w)

    def gradient(self, dy: Tensor) -> Operand:
        return Operand(dy)

    def state(self) -> dict[str, Tensor]:
        return {}


PLAIN = PlainRecipe()


class Products(Protocol):
    """The three products, dense or grouped."""

    def forward(self, x: Operand, w: Operand, bias: Tensor | None) -> Tensor: ...

    def data(self, dy: Operand, w: Operand, into: Tensor | None) -> Tensor:
        """Given `into`, the gradient is added to that tensor, which is returned."""
        ...

    def weight(self, dy: Operand, x: Operand, weight: Tensor) -> Tensor | None:
        """The gradient of `weight`, which may be written to the place that its sink lends; or None if the gradient was
        added to the sink's running sum."""
        ...


class ProductCall(NamedTuple):
    recipe: Recipe
    products: Products
    layers: int


def multiply(x: Tensor, layers: Sequence[WeightAndBias], recipe: Recipe, products: Products) -> tuple[Tensor, ...]:
    """The products of one input with the weights of several layers. Their input gradients are summed inside."""
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers]
    call = ProductCall(recipe, products, len(layers))
    return LinearProduct.apply(call, x, *weights, *biases)  # pyright: ignore[reportReturnType]


class LinearProduct(torch.autograd.Function):
    """Saves the operand of the input. Weights are kept as the tensors they are, not as saved tensors: the gradient sink
    is an attribute of the Parameter object."""

    @staticmethod
    def forward(ctx: Any, call: ProductCall, x: Tensor, *tensors: Any) -> Any:
        recipe, products, layers = call
        weights = tensors[:layers]
        biases = tensors[layers:]
        x_operand = recipe.input(x.flatten(0, -2))
        outputs: list[Tensor] = []
        for weight, bias in zip(weights, biases, strict=True):
            y = products.forward(x_operand, recipe.weight(weight), bias)
            y_shape = (*x.shape[:-1], y.shape[-1])
            outputs.append(y.to(x.dtype).view(y_shape))
        # What backward needs; the input only if some weight is trained.
        ctx.call = call
        ctx.weights = weights
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        kept = None
        if any(ctx.needs_input_grad[2 : 2 + layers]):
            kept = kept_operand(x_operand, recipe.keeps)
        ctx.save_for_backward(*pack_operand(kept))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe, products, layers = ctx.call
        x_operand = unpack_operand(*ctx.saved_tensors)
        _, needs_dx, *needed = ctx.needs_input_grad
        dx: Tensor | None = None
        d_weights: list[Tensor | None] = [None] * layers
        d_biases: list[Tensor | None] = [None] * layers
        for i, weight in enumerate(ctx.weights):
            dy = gradients[i].flatten(0, -2)
            dy_operand = recipe.gradient(dy)
            if needs_dx:  # summed over the layers
                dx = products.data(dy_operand, recipe.weight(weight), dx)
            if needed[i]:
                compute_wgrad = partial(products.weight, dy_operand, x_operand, weight)
                d_weights[i] = gradient_or_defer(weight, compute_wgrad)
            if needed[layers + i]:
                d_biases[i] = dy.sum(0)
        if dx is not None:
            dx = dx.to(ctx.x_dtype).view(ctx.x_shape)
        return None, dx, *d_weights, *d_biases


def kept_operand(x: Operand, keeps: KeptOperand) -> Operand:
    """The part of an input's operand that backward needs."""
    if keeps == "rows":
        return x._replace(columns=None)
    return x.along_columns() if keeps == "columns" else x


def pack_operand(operand: Operand | None) -> tuple[Tensor | None, ...]:
    """The tensors of an operand, as autograd saves them."""
    if operand is None:
        return None, None, None, None
    columns = operand.columns
    if columns is None:
        return operand.rows, operand.scales, None, None
    return operand.rows, operand.scales, columns.rows, columns.scales


def unpack_operand(rows: Tensor | None, *others: Tensor | None) -> Operand | None:
    if rows is None:
        return None
    scales, column_rows, column_scales = others
    if column_rows is None:
        return Operand(rows, scales)
    return Operand(rows, scales, Operand(column_rows, column_scales))
