"""The exchange inside a dense product: whose rows are where, and what its kernels signal with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from moefold.kernels.routing.arrival_pieces import PieceSignals


class ProductExchange(NamedTuple):
    """An exchange inside a dense product. `me`: this rank; `shards`: rows of each rank. `end` ends the exchange.
    `flags`: of one sender, as many as the arena has."""

    me: int
    shards: tuple[int, ...]
    end: Callable[[], None]
    signals: PieceSignals | None = None
    flags: int = 0

    @property
    def rows(self) -> int:
        return sum(self.shards)

    def rows_of(self, rank: int) -> slice:
        """Those of a rank among all."""
        begin = sum(self.shards[:rank])
        return slice(begin, begin + self.shards[rank])

    def slots_of(self, sender: int) -> slice:
        """Where what a rank has for this one stands in its room."""
        most = max(self.shards)
        begin = sender * most
        return slice(begin, begin + self.shards[self.me])

    def heads_of(self, x: Tensor, rank: int) -> Tensor:
        """The columns of a rank's heads among those of all ranks."""
        heads = x.chunk(len(self.shards), 1)
        return heads[rank]

    def arrived_layers(self, room: Tensor, inputs: Sequence[Tensor], rank: int) -> tuple[Tensor, ...]:
        """All heads of a rank's rows in its room, by layer; `inputs` have those of one rank."""
        widths = [x.shape[1] * len(self.shards) for x in inputs]
        return room[: self.shards[rank]].split(widths, 1)
