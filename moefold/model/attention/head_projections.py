"""Projections from rows to heads before attention, and from heads back to rows behind it: what lies around a context
mechanism. Attention over tp alone has its own (`HeadsOverTp`, attention_base.py); model/heads_in_exchanges.py swaps
positions for heads inside."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moefold.model.steps import AnyFunction
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear, LinearGroup


class HeadProjections(Protocol):
    """`around`: a memory region, called around the rows that are gathered, or around the product."""

    def to_heads(
        self, h_TD: Tensor, layers: LinearGroup, around: AnyFunction, shard: TokenShard
    ) -> tuple[list[Tensor], TokenShard]:
        """(B, S, heads, width) of each layer: heads that this rank attends with, and the positions that they are of."""
        ...

    def from_heads(self, y_BSN: Tensor, layer: Linear, around: AnyFunction, shard: TokenShard) -> Tensor:
        """(T, D): the product over all heads for this rank's rows. `shard`: the positions of `to_heads`."""
        ...
