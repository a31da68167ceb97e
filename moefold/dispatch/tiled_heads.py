"""Dense products of ranks that share sequences, whose tiles are multiplied while positions are swapped for heads, over
an arena (kernels/linear/swapped_products.py): the projections before and behind attention by all-to-all.

    to_heads      this rank's rows -> heads of this rank for the rows of all             backward: from_heads
    from_heads    this rank's heads of all rows -> product over all heads of its rows    backward: to_heads

The gradient of a product's input is an exchange of the other kind with the transposed weight. Gradients of weights are
those of this rank's rows (kernels/linear/product.py), now or deferred: of `to_heads` from the gradients that arrive in
backward, of `from_heads` from a copy of the heads that arrived in forward, since the next exchange but one overwrites
them.

T rows of this rank, C of all ranks, D inputs, N outputs, H columns of a rank's heads, K of all ranks'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.arena import Arena
from moefold.dispatch.tiled_products import ArenaProducts, Shards, kept_for_gradients
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.linear.swapped_products import project_from_heads, project_to_heads
from moefold.kernels.routing.arrival_pieces import PieceSignals


class JoinedHeads(NamedTuple):
    """The product over all heads of this rank's rows, (T, N), this rank's heads of all rows by layer, and those of all
    other ranks where they have arrived."""

    y_TN: Tensor
    inputs: Sequence[Tensor]
    room: Tensor
    exchange: ProductExchange

    def together(self) -> tuple[Tensor, ...]:
        """(T, K) of each layer in memory of the exchange, which the next but one overwrites."""
        me = self.exchange.me
        own = self.exchange.rows_of(me)
        layers = self.exchange.arrived_layers(self.room, self.inputs, me)
        for x_TK, x_CH in zip(layers, self.inputs, strict=True):
            self.exchange.heads_of(x_TK, me).copy_(x_CH[own])
        return layers


class TiledHeads(ArenaProducts):
    def __init__(self, arena: Arena, kernels: BoundKernels, signals: PieceSignals | None = None, flags: int = 0):
        super().__init__(arena, kernels, signals, flags)
        self.project_to_heads = kernels[project_to_heads]
        self.project_from_heads = kernels[project_from_heads]

    def to_heads(self, x_TD: Tensor, weights: Sequence[Tensor], shards: Shards | None = None) -> tuple[Tensor, ...]:
        """(C, H) of each weight (K, D). `shards`: rows of each rank; by default as many as here."""
        shards = shards or self.even_shards(len(x_TD))
        return ProductToHeads.apply(self, shards, x_TD, *weights)  # pyright: ignore[reportReturnType]

    def from_heads(self, x_CH: Tensor, weight_NK: Tensor, shards: Shards | None = None) -> Tensor:
        """(T, N)."""
        shards = shards or self.even_shards(len(x_CH) // self.arena.axis.size)
        return ProductFromHeads.apply(self, shards, x_CH, weight_NK)  # pyright: ignore[reportReturnType]

    def make_heads(self, x_TD: Tensor, weights: Sequence[Tensor], shards: Shards) -> Sequence[Tensor]:
        width = sum(len(weight) for weight in weights) // len(shards)
        rooms = self.arena.rooms(sum(shards), width, x_TD.dtype)
        return self.project_to_heads(x_TD, weights, rooms, self.exchange("heads", shards))

    def join_heads(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], shards: Shards) -> JoinedHeads:
        width = sum(x_CH.shape[1] for x_CH in inputs) * len(shards)
        rooms = self.arena.rooms(max(shards), width, inputs[0].dtype)
        exchange = self.exchange("heads", shards)
        y_TN = self.project_from_heads(inputs, weights, rooms, exchange)
        return JoinedHeads(y_TN, inputs, rooms[exchange.me], exchange)


class ProductToHeads(torch.autograd.Function):
    """Saves this rank's rows, if some weight is trained."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledHeads, shards: Shards, x_TD: Tensor, *weights: Tensor) -> Any:
        ctx.tiled = tiled
        ctx.shards = shards
        ctx.weights = weights
        _, _, _, *trained = ctx.needs_input_grad
        ctx.save_for_backward(x_TD if any(trained) else None)
        return tuple(tiled.make_heads(x_TD, weights, shards))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Both gradients need those of all heads. A copy of them is made if that of a weight is computed later."""
        (x_TD,) = ctx.saved_tensors
        _, _, _, *trained = ctx.needs_input_grad
        turned = [weight.T for weight in ctx.weights]
        joined = ctx.tiled.join_heads(gradients, turned, ctx.shards)
        d_weights: list[Tensor | None] = [None for _ in trained]
        layers = joined.together() if any(trained) else ()
        for layer, dy_TK in enumerate(layers):
            if trained[layer]:
                kept_TK = kept_for_gradients(dy_TK)
                d_weights[layer] = ctx.tiled.weight_gradient(ctx.weights[layer], kept_TK, x_TD)
        return None, None, joined.y_TN, *d_weights


class ProductFromHeads(torch.autograd.Function):
    """Saves a copy of all heads, if the weight is trained."""

    @staticmethod
    def forward(ctx: Any, tiled: TiledHeads, shards: Shards, x_CH: Tensor, weight_NK: Tensor) -> Any:
        joined = tiled.join_heads([x_CH], [weight_NK], shards)
        ctx.tiled = tiled
        ctx.shards = shards
        ctx.weight = weight_NK
        ctx.save_for_backward(joined.together()[0].clone() if ctx.needs_input_grad[3] else None)
        return joined.y_TN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x_TK,) = ctx.saved_tensors
        (dy_TN,) = gradients
        _, _, needs_dx, is_trained = ctx.needs_input_grad
        dx_CH = None
        if needs_dx:
            (dx_CH,) = ctx.tiled.make_heads(dy_TN, [ctx.weight.T], ctx.shards)
        d_weight = ctx.tiled.weight_gradient(ctx.weight, dy_TN, x_TK) if is_trained else None
        return None, None, dx_CH, d_weight
