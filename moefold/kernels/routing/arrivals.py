"""Arrivals: what the host knows of the tokens that arrive from all ranks, and the maps of their rows.

T tokens of this rank, s ranks that send, N rows of arrived tokens, K choices of a token, R rows of experts, e experts
held here.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ArrivalShape(NamedTuple):
    """What the host knows of the tokens that arrive. `sender`: this rank among those that send; `etp` of these hold the
    same experts. `tokens` of this rank. `arriving`: N; `rows`: R. `multiple`: rows of an expert are padded to a
    multiple of it; `each`: to this number; 0: they are not."""

    sender: int
    etp: int
    held: int
    tokens: int
    arriving: int
    rows: int
    multiple: int = 1
    each: int = 0

    @property
    def rank(self) -> int:
        return self.sender // self.etp


class ArrangedArrivals(NamedTuple):
    """`slots_Ts`: the row of each token of this rank in the room of each rank, -1 for none. `room_s`: the room that
    each rank keeps for tokens, -1 for none. The others are those of a row order (dispatch/base.py)."""

    index_R: Tensor
    slots_NK: Tensor
    weight_R: Tensor
    ends_e: Tensor
    slots_Ts: Tensor
    room_s: Tensor
