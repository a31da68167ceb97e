"""Pieces of arriving tokens, and the places that their results return to.

A piece is what a rank sends to another of one block of 128 tokens. Rows that arrive lie in the order of their senders
and of their tokens, so a piece is a range of rows, and counts that ranks announce with their choices tell where it
ends. A row of experts is ready with the piece of its token: no rank waits for another whose tokens it does not read.

Results return to the rank of their tokens, into a room that has those of the first rank's experts first. There they
keep their order, so each sender's results move by one number of rows.

s ranks that send, B blocks of a sender, C counts of a block, P = s x B pieces, T tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.routing.exchange_tail import ExchangeTail


class PieceMaps(NamedTuple):
    """`ends_P`: where pieces end among the rows that arrive here, by sender and block. `shift_s`: what a row moves by,
    from its place here to that of its result in the room of its sender. `back_Ts`: the row of each token's result of
    each rank in the room of this one, -1 for none."""

    ends_P: Tensor
    shift_s: Tensor
    back_Ts: Tensor


class TileRecords(NamedTuple):
    """Clocks of a kernel, in nanoseconds, or where there is no clock in readings so far (`ticks`): when a tile, or a
    piece, was begun, when it had what it waited for, and when it was finished. Those that no program took stay zero."""

    tiles_M3: Tensor
    pieces_P3: Tensor
    ticks: Tensor


class PieceSignals(NamedTuple):
    """What kernels need to signal in pieces. `flags`: addresses of the words of all ranks, on the device, in which the
    number of an exchange stands for each piece that has come. `programs`: of a kernel, of which `senders` send.
    `apart`: what is sent and what is multiplied are launches of their own, for ranks that are played in turns."""

    tail: ExchangeTail
    flags: Tensor
    programs: int
    senders: int
    apart: bool = False
    records: TileRecords | None = None


class TileExchange(NamedTuple):
    """An exchange inside a product. `me`: this rank; `turn`: the room that it uses. `end` ends the exchange."""

    me: int
    turn: int
    pieces: PieceMaps
    end: Callable[[], None]
    signals: PieceSignals | None = None


def arrange_pieces(
    counts_sBC: Tensor,
    slots_Ts: Tensor,
    me: int,
    etp: int,
    arriving: int,
    lost: Tensor | None = None,
) -> PieceMaps:
    """`arriving`: rows that a room has. Where `lost` (a word) is not zero, a rank has not written its counts, and
    nothing arrives: taken for places, they would end the device before the host can name that rank."""
    senders, _, columns = counts_sBC.shape
    ranks = senders // etp
    first = columns - 1 - ranks
    tokens_sBn = counts_sBC[:, :, first : first + ranks]
    if lost is not None:
        tokens_sBn = torch.where(lost == 0, tokens_sBn, 0)
    here_P = tokens_sBn[:, :, me // etp].flatten()
    ends_P = here_P.cumsum(0).clamp(max=arriving)
    # tokens by sender and by rank that they are sent to
    tokens_sn = tokens_sBn.sum(1)
    tokens_ss = tokens_sn.repeat_interleave(etp, dim=1)
    arrived_before_ss = tokens_ss.cumsum(0) - tokens_ss
    returned_before_ss = tokens_ss.cumsum(1) - tokens_ss
    shift_ss = returned_before_ss - arrived_before_ss
    back_Ts = torch.where(slots_Ts >= 0, slots_Ts + shift_ss[me], -1)
    shift_s = shift_ss[:, me].contiguous()
    return PieceMaps(ends_P.int(), shift_s.int(), back_Ts.int())


def empty_records(tiles: int, pieces: int, device: torch.device) -> TileRecords:
    tiles_M3 = torch.zeros(tiles, 3, dtype=torch.int64, device=device)
    pieces_P3 = tiles_M3.new_zeros(pieces, 3)
    return TileRecords(tiles_M3, pieces_P3, tiles_M3.new_zeros(1))
