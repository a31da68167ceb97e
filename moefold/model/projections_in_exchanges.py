"""Projections of tensor-parallel ranks whose tiles are multiplied while rows travel (dispatch/tiled_projections.py).

A layer is called as ever, and its product is another one: of rows that arrive, or of sums that leave. Passes without
backward, whose rows may be more than the arena has room for and whose steps may be captured, go by collectives.

T rows of this rank, C of all ranks, D width, N inputs of the product whose sums are scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.linear.linear import Recipes
from moefold.kernels.linear.product import PLAIN, Adapter
from moefold.model.steps import AnyFunction
from moefold.precision.linear import Layers, Linear, Outputs, TpProjections


class ProjectionsInExchanges:
    """`rows`: of a rank, for which the arena has room. `otherwise`: how passes without backward gather and sum."""

    def __init__(self, tiled: TiledProjections, rows: int, otherwise: TpProjections):
        self.tiled = tiled
        self.rows = rows
        self.otherwise = otherwise

    def gather(self, h_TD: Tensor, layers: nn.Module, around: AnyFunction) -> Any:
        if not self.takes(len(h_TD)):
            return self.otherwise.gather(h_TD, layers, around)
        multiply = partial(self.multiply_gathered, around)
        return layers(h_TD, multiply)

    def scatter(self, x_CN: Tensor, layer: Linear, around: AnyFunction) -> Tensor:
        ranks = self.tiled.arena.axis.size
        if not self.takes(len(x_CN) // ranks):
            return self.otherwise.scatter(x_CN, layer, around)
        multiply = partial(self.multiply_scattered, layer)
        return around(layer, x_CN, multiply)

    def require_peers(self) -> None:
        self.tiled.arena.require_peers()

    def takes(self, rows: int) -> bool:
        """Whether a pass exchanges so many rows of each rank: the same on all of them."""
        return torch.is_grad_enabled() and rows <= self.rows

    def multiply_gathered(
        self, around: AnyFunction, h_TD: Tensor, layers: Layers, recipes: Recipes, adapters: Sequence[Adapter]
    ) -> Outputs:
        require_plain(recipes, adapters)
        weights = [weight for weight, _ in layers]
        products = self.tiled.gather(h_TD, weights, around=around)
        outputs: list[Tensor] = []
        for y_CN, (_, bias) in zip(products, layers, strict=True):
            outputs.append(y_CN if bias is None else y_CN + bias)
        return tuple(outputs)

    def multiply_scattered(
        self, layer: Linear, x_CN: Tensor, layers: Layers, recipes: Recipes, adapters: Sequence[Adapter]
    ) -> Outputs:
        """The bias is added to the sum, by each rank to its own rows, not by the first rank to its summand."""
        require_plain(recipes, adapters)
        weight, _ = layers[0]
        y_TD = self.tiled.scatter(x_CN, weight)
        if layer.bias is not None:
            y_TD = y_TD + layer.bias.flatten()
        return (y_TD,)


def require_plain(recipes: Recipes, adapters: Sequence[Adapter]) -> None:
    assert recipes is PLAIN, "rules refuse other recipes (config/tile_rules.py)"
    assert not any(adapters), "rules refuse adapters (config/tile_rules.py)"
