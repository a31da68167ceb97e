"""Dense products of tensor-parallel ranks whose tiles are multiplied while rows travel, over an arena
(kernels/linear/exchanged_products.py).

    gather     rows of all ranks -> products with this rank's part of each weight        backward: scatter
    scatter    products of this rank's part of the inputs -> this rank's rows of sums    backward: gather

The gradient of a product's input is an exchange of the other kind with the transposed weight. Gradients of weights are
those of linear products (kernels/linear/product.py), now or deferred; of `gather` from a copy of the rows that arrived,
since the next exchange but one overwrites them. A memory region may drop that copy: rows are then gathered once more in
backward.

T rows of this rank, C of all ranks, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.arena import Arena
from moefold.dispatch.tiled_products import ArenaProducts, Shards, kept_for_gradients
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.exchanged_products import gather_rows, multiply_gathered, scatter_products
from moefold.kernels.routing.arrival_pieces import PieceSignals

AroundRows = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def call_directly(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return fn(x)


class ArrivedRows(NamedTuple):
    """This rank's rows, those of all others where they have arrived, and the place of its own among them."""

    own_TD: Tensor
    room_CD: Tensor
    own: slice

    def together(self) -> Tensor:
        """(C, D) in memory of the exchange, which the next but one overwrites."""
        self.room_CD[self.own] = self.own_TD
        return self.room_CD

    @torch.no_grad()
    def copy(self) -> Tensor:
        return self.together().clone()


class TiledProjections(ArenaProducts):
    def __init__(self, arena: Arena, kernels: BoundKernels, signals: PieceSignals | None = None, flags: int = 0):
        super().__init__(arena, kernels, signals, flags)
        self.multiply_gathered = kernels[multiply_gathered]
        self.scatter_products = kernels[scatter_products]

    def gather(
        self,
        x_TD: Tensor,
        weights: Sequence[Tensor],
        shards: Shards | None = None,
        around: AroundRows = call_directly,
    ) -> tuple[Tensor, ...]:
        """(C, N) of each weight (N, D). `shards`: rows of each rank; by default as many as here. `around`: a memory
        region, called around the rows of all ranks, which gradients of weights need."""
        shards = shards or self.even_shards(len(x_TD))
        arrived: list[ArrivedRows] = []
        outputs: Any = GatheredProduct.apply(self, shards, arrived, tuple(weights), x_TD)
        is_trained = any(weight.requires_grad for weight in weights)
        if not is_trained or not torch.is_grad_enabled():
            return outputs
        rows = ArrivedOrGathered(arrived[0].copy(), partial(self.gather_rows, shards))
        x_CD = around(rows, x_TD)
        return WeightGradients.apply(self, len(weights), x_CD, *weights, *outputs)  # pyright: ignore[reportReturnType]

    def scatter(self, x_CD: Tensor, weight_ND: Tensor, shards: Shards | None = None) -> Tensor:
        """(T, N)."""
        shards = shards or self.even_shards(len(x_CD) // self.arena.axis.size)
        return ScatteredProduct.apply(self, shards, x_CD, weight_ND)  # pyright: ignore[reportReturnType]

    def multiply(self, x_TD: Tensor, weights: Sequence[Tensor], shards: Shards) -> tuple[Sequence[Tensor], ArrivedRows]:
        rooms = self.arena.rooms(sum(shards), x_TD.shape[1], x_TD.dtype)
        exchange = self.exchange("tokens", shards)
        outputs = self.multiply_gathered(x_TD, weights, rooms, exchange)
        return outputs, ArrivedRows(x_TD, rooms[exchange.me], exchange.rows_of(exchange.me))

    def gather_rows(self, shards: Shards, x_TD: Tensor) -> Tensor:
        """(C, D), by an exchange without a product."""
        rooms = self.arena.rooms(sum(shards), x_TD.shape[1], x_TD.dtype)
        return gather_rows(x_TD, rooms, self.exchange("tokens", shards))

    def multiply_and_sum(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], shards: Shards) -> Tensor:
        slots = max(shards) * len(shards)
        rooms = self.arena.rooms(slots, len(weights[0]), inputs[0].dtype)
        return self.scatter_products(inputs, weights, rooms, self.exchange("sums", shards))


class ArrivedOrGathered:
    """The rows of all ranks: those that arrived, and those of a further exchange where they are asked for again."""

    def __init__(self, arrived_CD: Tensor, gather_again: Callable[[Tensor], Tensor]):
        self.arrived: Tensor | None = arrived_CD
        self.gather_again = gather_again

    def __call__(self, x_TD: Tensor) -> Tensor:
        arrived = self.arrived
        self.arrived = None
        return self.gather_again(x_TD) if arrived is None else arrived


class GatheredProduct(torch.autograd.Function):
    """The gradient of the rows. Weights have theirs by `WeightGradients`; `arrived` gets the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        tiled: TiledProjections,
        shards: Shards,
        arrived: list[ArrivedRows],
        weights: tuple[Tensor, ...],
        x_TD: Tensor,
    ) -> Any:
        outputs, rows = tiled.multiply(x_TD, weights, shards)
        arrived.append(rows)
        ctx.tiled = tiled
        ctx.shards = shards
        ctx.weights = weights
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        turned = [weight.T for weight in ctx.weights]
        dx_TD = ctx.tiled.multiply_and_sum(gradients, turned, ctx.shards)
        return None, None, None, None, dx_TD


class WeightGradients(torch.autograd.Function):
    """The outputs of gathered products as they are; backward has gradients of weights, from the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledProjections, layers: int, x_CD: Tensor, *tensors: Tensor) -> Any:
        weights, outputs = tensors[:layers], tensors[layers:]
        ctx.tiled = tiled
        ctx.weights = weights
        ctx.save_for_backward(x_CD)
        return tuple(y_CN.view_as(y_CN) for y_CN in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x_CD,) = ctx.saved_tensors
        _, _, _, *needed = ctx.needs_input_grad
        d_weights: list[Tensor | None] = []
        for weight, dy_CN, is_trained in zip(ctx.weights, gradients, needed, strict=False):
            d_weights.append(ctx.tiled.weight_gradient(weight, dy_CN, x_CD) if is_trained else None)
        return None, None, None, *d_weights, *gradients


class ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiled: TiledProjections, shards: Shards, x_CD: Tensor, weight_ND: Tensor) -> Any:
        ctx.tiled = tiled
        ctx.shards = shards
        ctx.weight = weight_ND
        ctx.save_for_backward(x_CD if ctx.needs_input_grad[3] else None)
        return tiled.multiply_and_sum([x_CD], [weight_ND], shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Both gradients need the gathered one. A copy of it is made if that of the weight is computed later."""
        (x_CD,) = ctx.saved_tensors
        (dy_TN,) = gradients
        (dx_CD,), rows = ctx.tiled.multiply(dy_TN, [ctx.weight.T], ctx.shards)
        d_weight = None
        if ctx.needs_input_grad[3]:
            dy_CN = kept_for_gradients(rows.together())
            d_weight = ctx.tiled.weight_gradient(ctx.weight, dy_CN, x_CD)
        return None, None, dx_CD, d_weight
