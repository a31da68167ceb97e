"""All linear products as one autograd function: number format x weight gradient now or later x where it is written.

    y  = x W^T + b      forward
    dx = dy W           data gradient
    dW = dy^T x         weight gradient, now or deferred (layout/deferred_wgrad.py)

A recipe turns tensors into operands: the plain recipe leaves them as they are, a low-precision recipe quantises them.
Products multiply operands. Dense: x (T, D), W (N, D). Grouped: x (R, D) sorted by expert, W (E, N, D). Most operands
are matrices with scales (`Operand`), and any products multiply them; a recipe whose operands are otherwise brings its
products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.kernels.linear.low_rank_matrices import add_product, scaled_product, write_matrix_gradient
from moefold.layout.declare import PartOfTensor
from moefold.layout.deferred_wgrad import gradient_or_defer
from moefold.layout.token_numbers import numbers_of_rows

WeightAndBias = tuple[Tensor, Tensor | None]
Adapter = tuple[Tensor, Tensor, float] | None  # LowRankMatrices of a dense layer
KeptOperand = Literal["rows", "columns", "both"]
Role = Literal["tokens", "input", "gradient"]  # of rows in a product; tokens are an input that is gathered from them


class ExpertRows(NamedTuple):
    """Rows sorted by expert: those of expert e end before `ends_E[e]`. `are_tokens`: rows are gathered tokens, which
    may be quantised before they are gathered."""

    ends_E: Tensor
    are_tokens: bool = False


def ends_of_rows(x: Tensor, rows: ExpertRows | None) -> Tensor:
    """Where each expert's rows end. Without `rows`, x is the input of a dense layer: one expert."""
    if rows is not None:
        return rows.ends_E
    count = len(x)
    return x.new_full((1,), count, dtype=torch.int32)


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this machine's processor has instructions for products of this type."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def widened(x: Tensor) -> Tensor:
    """`x` in the type in which its device multiplies it."""
    if x.device.type != "cpu" or cpu_multiplies(x.dtype):
        return x
    return x.float()


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
            blocks = scales.shape[dim]
            block = -(-size // blocks)
            scales = scales.repeat_interleave(block, dim)
            scales = scales.narrow(dim, 0, size)  # the last block may be cut short
        values = self.rows.to(scales.dtype)
        return values * scales

    def along_columns(self) -> Operand:
        """The operand of the weight gradient."""
        return self if self.columns is None else self.columns

    def dequantised_columns(self) -> Tensor:
        columns = self.along_columns()
        return columns.dequantised()


class Recipe(Protocol):
    """The number format of a product's operands. `keeps`: the part of the input's operand that forward saves for the
    weight gradient. `row_multiple`: each expert's rows are padded to a multiple of it, by the recipe itself.
    `rounds_by_token`: gradients are rounded by random numbers that depend on the numbers of their rows' tokens.
    `products`: those that multiply its operands; None: operands are `Operand`s, which any products multiply."""

    name: str
    keeps: KeptOperand
    row_multiple: int
    rounds_by_token: bool
    products: Products | None

    @property
    def input_maker(self) -> object:
        """What makes operands of inputs: layers that read one input, and have the same, share its operand."""
        ...

    def input(self, x: Tensor, rows: ExpertRows | None) -> Any:
        """The operand of an input. Without `rows`, x is the input of a dense layer."""
        ...

    def weight(self, w: Tensor) -> Any:
        """Asked for in forward and again in backward: a recipe may cache it until the optimizer moves the weight."""
        ...

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> Any: ...

    def state(self) -> Mapping[str, Tensor | PartOfTensor]:
        """Tensors that outlive a step, such as a delayed maximum, by name: checkpoints list them."""
        ...


class PlainRecipe:
    """Operands in the model's own precision."""

    name = "plain"
    keeps: KeptOperand = "rows"
    row_multiple = 1
    rounds_by_token = False
    products: Products | None = None

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: Tensor, rows: ExpertRows | None) -> Operand:
        return Operand(x)

    def weight(self, w: Tensor) -> Operand:
        return Operand(w)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> Operand:
        return Operand(dy)

    def state(self) -> dict[str, Tensor]:
        return {}


PLAIN = PlainRecipe()


class Products(Protocol):
    """The three products, dense or grouped, of the operands of one recipe or of plain `Operand`s."""

    def forward(self, x: Any, w: Any, bias: Tensor | None) -> Tensor: ...

    def data(self, dy: Any, w: Any, into: Tensor | None) -> Tensor:
        """Given `into`, the gradient is added to that tensor, which is returned."""
        ...

    def weight(self, dy: Any, x: Any, weight: Tensor) -> Tensor | None:
        """The gradient of `weight`, which may be written to the place that its sink lends; or None if the gradient was
        added to the sink's running sum."""
        ...


class ProductCall(NamedTuple):
    recipes: Sequence[Recipe]  # of each layer; the first makes the operand of their input
    products: Products
    layers: int
    rows: ExpertRows | None
    number_R: Tensor | None
    scales: tuple[float | None, ...]  # of each layer's adapter; None: it has none


def multiply(
    x: Tensor,
    layers: Sequence[WeightAndBias],
    recipes: Recipe | Sequence[Recipe],
    products: Products,
    rows: ExpertRows | None = None,
    adapters: Sequence[Adapter] = (),
) -> tuple[Tensor, ...]:
    """The products of one input with the weights of several layers. Their input gradients are summed inside. `recipes`:
    one for all layers, or one for each with the same `input_maker`. `products` multiply the operands, unless the recipe
    brings its own. `adapters`: one or None for each dense layer, whose output is added."""
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers]
    count = len(layers)
    if not isinstance(recipes, Sequence):
        recipes = [recipes] * count
    recipe = recipes[0]
    number_R = None
    if recipe.rounds_by_token:
        *lead, _ = x.shape
        row_count = prod(lead)
        number_R = numbers_of_rows(row_count, x.device)
    own_products = recipe.products or products
    matrices = [adapter or (None, None, None) for adapter in adapters or [None] * count]
    lefts, rights, scales = zip(*matrices, strict=True)
    call = ProductCall(recipes, own_products, count, rows, number_R, scales)
    return LinearProduct.apply(call, x, *weights, *biases, *lefts, *rights)  # pyright: ignore[reportReturnType]


class LinearProduct(torch.autograd.Function):
    """Saves the operand of the input, and beside adapters the input and its products with A. Weights are kept as the
    tensors they are, not as saved tensors: the gradient sink is an attribute of the Parameter object."""

    @staticmethod
    def forward(ctx: Any, call: ProductCall, x: Tensor, *tensors: Any) -> Any:
        recipes, products, layers, rows, _, scales = call
        recipe = recipes[0]
        weights, biases, lefts, rights = by_layer(tensors, layers)
        *lead, _ = x.shape
        x_TD = x.flatten(0, -2)
        x_operand = recipe.input(x_TD, rows)
        outputs: list[Tensor] = []
        lows: list[Tensor | None] = []
        for i, weight in enumerate(weights):
            w_operand = recipes[i].weight(weight)
            y = products.forward(x_operand, w_operand, biases[i])
            y = y.to(x.dtype)
            low = None
            scale = scales[i]
            if scale is not None:
                low = scaled_product(x_TD, lefts[i].T, scale)
                y = y.addmm_(low, rights[i].T)
            lows.append(low)
            width = y.shape[-1]
            y = y.view(*lead, width)
            outputs.append(y)
        # What backward needs; the operand of the input only if some weight is trained.
        ctx.call = call
        ctx.weights = weights
        ctx.matrices = (lefts, rights)
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        kept = None
        trained = ctx.needs_input_grad[2 : 2 + layers]
        if any(trained):
            kept = kept_operand(x_operand, recipe.keeps)
        ctx.kept_form = without_tensors(kept)
        is_adapted = any(scale is not None for scale in scales)
        plain = x_TD if is_adapted else None
        ctx.save_for_backward(plain, *lows, *tensors_of(kept))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipes, products, layers, rows, number_R, scales = ctx.call
        x_TD, *saved = ctx.saved_tensors
        lows = saved[:layers]
        leaves = iter(saved[layers:])
        x_operand = with_tensors(ctx.kept_form, leaves)
        _, needs_dx, *needed = ctx.needs_input_grad
        lefts, rights = ctx.matrices
        dx: Tensor | None = None
        d_weights: list[Tensor | None] = [None] * layers
        d_biases: list[Tensor | None] = [None] * layers
        d_lefts: list[Tensor | None] = [None] * layers
        d_rights: list[Tensor | None] = [None] * layers
        for i, weight in enumerate(ctx.weights):
            gradient = gradients[i]
            dy = gradient.flatten(0, -2)
            dy_operand = recipes[i].gradient(dy, rows, number_R)
            if needs_dx:  # summed over the layers
                w_operand = recipes[i].weight(weight)
                dx = products.data(dy_operand, w_operand, dx)
            if needed[i]:
                dy_columns = dy_operand.along_columns()
                compute_wgrad = partial(products.weight, dy_columns, x_operand, weight)
                d_weights[i] = gradient_or_defer(weight, compute_wgrad)
            if needed[layers + i]:
                d_biases[i] = dy.sum(0)
            if scales[i] is not None:
                left, right = lefts[i], rights[i]
                dlow = scaled_product(dy, right, scales[i])
                if needs_dx:
                    dx = add_product(dx, dlow, left)
                d_lefts[i] = gradient_or_defer(left, partial(write_matrix_gradient, left, dlow, x_TD))
                d_rights[i] = gradient_or_defer(right, partial(write_matrix_gradient, right, dy, lows[i]))
        if dx is not None:
            dx = dx.to(ctx.x_dtype)
            dx = dx.view(ctx.x_shape)
        return None, dx, *d_weights, *d_biases, *d_lefts, *d_rights


def by_layer(tensors: Sequence[Any], layers: int) -> Iterator[Sequence[Any]]:
    """Tensors of each kind, one for each layer."""
    for first in range(0, len(tensors), layers):
        yield tensors[first : first + layers]


def kept_operand(x: Any, keeps: KeptOperand) -> Any:
    """The part of an input's operand that backward needs."""
    if keeps == "rows":
        return x._replace(columns=None)
    return x.along_columns() if keeps == "columns" else x


# An operand is a tree of named tuples whose leaves are tensors or None; autograd saves its leaves.


def tensors_of(operand: Any) -> list[Tensor | None]:
    if not isinstance(operand, tuple):
        return [operand]
    leaves: list[Tensor | None] = []
    for part in operand:  # pyright: ignore[reportUnknownVariableType]
        leaves += tensors_of(part)
    return leaves


def with_tensors(form: Any, leaves: Iterator[Tensor | None]) -> Any:
    """The operand of this form with these leaves."""
    if not isinstance(form, tuple):
        return next(leaves)
    parts = [with_tensors(part, leaves) for part in form]  # pyright: ignore[reportUnknownVariableType]
    return type(form)(*parts)


def without_tensors(operand: Any) -> Any:
    """The form of an operand."""
    return with_tensors(operand, repeat(None))
