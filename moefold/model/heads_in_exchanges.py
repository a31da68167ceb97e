"""Projections to and from heads whose tiles are multiplied while cp ranks swap positions for heads
(dispatch/tiled_heads.py): attention sees whole sequences and this rank's share of the heads, as a tensor-parallel rank
does. Norms and rotations of heads lie behind the swap.

Passes without backward, whose rows may be more than the arena has room for, swap by collectives inside attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.dispatch.tiled_heads import TiledHeads
from moefold.kernels.linear.linear import Recipes
from moefold.kernels.linear.product import Adapter
from moefold.model.attention.context_parallel import share_of_heads
from moefold.model.attention.head_projections import HeadProjections
from moefold.model.projections_in_exchanges import require_plain
from moefold.model.steps import AnyFunction
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Layers, Linear, LinearGroup, Outputs


class HeadsInExchanges:
    """`rows`: of a rank, for which the arena has room. `otherwise`: how passes without backward project."""

    def __init__(self, tiled: TiledHeads, rows: int, otherwise: HeadProjections):
        self.tiled = tiled
        self.rows = rows
        self.otherwise = otherwise

    def to_heads(
        self, h_TD: Tensor, layers: LinearGroup, around: AnyFunction, shard: TokenShard
    ) -> tuple[list[Tensor], TokenShard]:
        """No rows are gathered here, so that the region around them has nothing to keep."""
        takes = torch.is_grad_enabled() and len(h_TD) <= self.rows
        if not takes:
            return self.otherwise.to_heads(h_TD, layers, around, shard)
        by_rank = layers(h_TD, self.multiply_to_heads)
        return shard.in_sequence_order(*by_rank), shard.swapped_for_heads()

    def from_heads(self, y_BSN: Tensor, layer: Linear, around: AnyFunction, shard: TokenShard) -> Tensor:
        mine = shard.before_swap
        if mine is None:
            return self.otherwise.from_heads(y_BSN, layer, around, shard)
        y_CN = mine.in_rank_order(y_BSN)
        return around(layer, y_CN, self.multiply_from_heads)

    def require_peers(self) -> None:
        self.tiled.arena.require_peers()

    def multiply_to_heads(self, h_TD: Tensor, layers: Layers, recipes: Recipes, adapters: Sequence[Adapter]) -> Outputs:
        require_plain(recipes, adapters)
        weights = [weight for weight, _ in layers]
        products = self.tiled.to_heads(h_TD, weights)
        outputs: list[Tensor] = []
        axis = self.tiled.arena.axis
        for y_CN, (_, bias) in zip(products, layers, strict=True):
            outputs.append(y_CN if bias is None else y_CN + share_of_heads(bias, axis))
        return tuple(outputs)

    def multiply_from_heads(
        self, x_CN: Tensor, layers: Layers, recipes: Recipes, adapters: Sequence[Adapter]
    ) -> Outputs:
        """The bias is added to this rank's rows of the sum."""
        require_plain(recipes, adapters)
        ((weight, bias),) = layers
        y_TD = self.tiled.from_heads(x_CN, weight)
        return (y_TD if bias is None else y_TD + bias,)
