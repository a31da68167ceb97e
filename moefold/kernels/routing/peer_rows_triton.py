"""Rows between ranks that write to each other's memory, in Triton. Imported only where Triton is.

Rooms of other ranks are given by a table of their addresses. A row has one writer, and nothing is atomic but the count
of programs that have ended, by which the last one gives the signals of the exchange.

T tokens, K choices of a token, D width, s ranks, N sources.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.kept_launch_triton import BoundArguments, KeptLaunch
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.peer_signals_triton import (
    begin_exchange,
    end_exchange,
    note_given,
    tail_arguments,
)
from moefold.kernels.routing.rows_triton import columns_of_program
from moefold.kernels.tile_triton import (
    load_or_zero,
    program_block,
    store_inside,
    tile_mask,
    tile_pointers,
    wide_program_id,
)
from moefold.layout.peer_rooms import PeerRooms, as_peer_rooms

ALIGNMENT = 16  # bytes of a room's address
TILE = 4096  # entries of a program
WARPS = 4
NUMBERS = 1024  # of choices, of a program
MOST_ROWS = 64  # of a program: narrow rows have programs enough too


@triton.jit
def load_room(addresses, rank, like):
    """The room of a rank, as a pointer of the type of `like`."""
    address = tl.load(addresses + rank)
    room = address.to(like.dtype)
    return tl.multiple_of(room, 16)


@triton.jit
def load_slots(slots, n, column, inside, COLUMNS: constexpr):
    """Rows in one column of slots in 64 bits, -1 for none."""
    slot = tl.load(slots + n * COLUMNS + column, mask=inside, other=-1)
    return slot.to(tl.int64)


@triton.jit(do_not_specialize=["turn", "T", "me"])
def push_peer_rows_kernel(
    x_TD,
    slots_Ts,
    room_s,
    addresses,
    words,
    fault_2,
    finished,
    turn,
    room_size,
    T,
    D,
    me,
    patience,
    SIGNALS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    SENDERS: constexpr,
    CHOSEN: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """A part of some tokens, read once and written to one of the rooms of each of their ranks."""
    t = wide_program_id(0) * ROWS + tl.arange(0, ROWS)
    c = program_block(1, COLS)
    is_token = t < T
    is_column = c < D
    # loads first: none is moved ahead of a store
    x = load_or_zero(tile_pointers(x_TD, t, c, D), tile_mask(is_token, is_column))
    slots = ()
    rooms = ()
    for rank in tl.static_range(SENDERS):
        slots += (load_slots(slots_Ts, t, rank, is_token, SENDERS),)
        number = tl.zeros([], tl.int64) + turn
        if CHOSEN:
            kept = tl.load(room_s + rank).to(tl.int64)
            number = tl.where(kept >= 0, kept, number)
        rooms += (load_room(addresses, rank, x_TD) + number * room_size,)
    peers, own_address, exchange, is_lost = begin_exchange(words, me, SIGNALS, RANKS, WIDTH)
    for rank in tl.static_range(SENDERS):
        at = tile_pointers(rooms[rank], slots[rank], c, D)
        store_inside(at, x, tile_mask(slots[rank] >= 0, is_column))
    end_exchange(peers, own_address, exchange, is_lost, fault_2, finished, me, patience, SIGNALS, RANKS, WIDTH, CLOCKED)


@triton.jit(do_not_specialize=["me"])
def sum_rows_into_kernel(
    y_RD,
    slots_NK,
    room_ND,
    words,
    fault_2,
    finished,
    N,
    D,
    me,
    patience,
    SIGNALS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    K: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
    WIDE: constexpr,
):
    """A part of the sums over some sources' rows, in their order. Sources without rows are left out."""
    peers, own_address, exchange, is_lost = begin_exchange(words, me, SIGNALS, RANKS, WIDTH)
    n = wide_program_id(0) * ROWS + tl.arange(0, ROWS)
    c = program_block(1, COLS)
    is_column = c < D
    total = tl.zeros([ROWS, COLS], WIDE)
    has_rows = n < 0
    for k in tl.static_range(K):
        slot = load_slots(slots_NK, n, k, n < N, K)
        has_rows = has_rows | (slot >= 0)
        at = tile_pointers(y_RD, slot, c, D)
        y = load_or_zero(at, tile_mask(slot >= 0, is_column))
        total += y.to(WIDE)
    rounded = total.to(room_ND.dtype.element_ty)
    store_inside(tile_pointers(room_ND, n, c, D), rounded, tile_mask(has_rows, is_column))
    end_exchange(peers, own_address, exchange, is_lost, fault_2, finished, me, patience, SIGNALS, RANKS, WIDTH, CLOCKED)


@triton.jit(do_not_specialize=["me"])
def write_choices_into_kernel(
    x_R,
    slots_NK,
    room_NK,
    words,
    fault_2,
    finished,
    choices,
    me,
    patience,
    SIGNALS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    NUMBERS: constexpr,
):
    """The numbers of some choices in their order, zero for one without a row."""
    peers, own_address, exchange, is_lost = begin_exchange(words, me, SIGNALS, RANKS, WIDTH)
    i = program_block(0, NUMBERS)
    inside = i < choices
    slot = tl.load(slots_NK + i, mask=inside, other=-1)
    x = load_or_zero(x_R + slot, slot >= 0)
    store_inside(room_NK + i, x.to(room_NK.dtype.element_ty), inside)
    end_exchange(peers, own_address, exchange, is_lost, fault_2, finished, me, patience, SIGNALS, RANKS, WIDTH, CLOCKED)


@triton.jit(do_not_specialize=["T"])
def sum_peer_rows_kernel(
    slots_Ts,
    out_TD,
    addresses,
    T,
    D,
    SENDERS: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
    WIDE: constexpr,
):
    """A part of the sums of some tokens over their rows on all ranks, in the order of ranks."""
    t = wide_program_id(0) * ROWS + tl.arange(0, ROWS)
    c = program_block(1, COLS)
    is_token = t < T
    is_column = c < D
    total = tl.zeros([ROWS, COLS], WIDE)
    for rank in tl.static_range(SENDERS):
        slot = load_slots(slots_Ts, t, rank, is_token, SENDERS)
        room = load_room(addresses, rank, out_TD)
        at = tile_pointers(room, slot, c, D)
        y = load_or_zero(at, tile_mask(slot >= 0, is_column))
        total += y.to(WIDE)
    rounded = total.to(out_TD.dtype.element_ty)
    store_inside(tile_pointers(out_TD, t, c, D), rounded, tile_mask(is_token, is_column))


def upload_addresses(rooms: PeerRooms) -> Tensor:
    """A table of the addresses of rooms on their device. Each is a multiple of 16, as kernels take it to be."""
    addresses = [room.data_ptr() for room in rooms]
    assert all(address % ALIGNMENT == 0 for address in addresses), f"rooms begin at {addresses}"
    return torch.tensor(addresses, dtype=torch.int64, device=rooms[0].device)


def address_table(rooms: list[Tensor]) -> Tensor:
    return as_peer_rooms(rooms).keep(upload_addresses)


class TileShape(NamedTuple):
    """Tokens and columns of a program, and the grid of programs."""

    rows: int
    cols: int
    grid: tuple[int, int]


def tile_shape(tokens: int, width: int) -> TileShape:
    cols = columns_of_program(width, 1024)
    rows = min(MOST_ROWS, max(1, TILE // cols))
    grid = (triton.cdiv(max(tokens, 1), rows), triton.cdiv(width, cols))
    return TileShape(rows, cols, grid)


def bind_push(rooms: PeerRooms, tokens: int, turn: int, is_chosen: bool, tail: ExchangeTail | None) -> KeptLaunch:
    first = rooms[0]
    d = first.shape[2]
    addresses = address_table(rooms)
    rows, cols, grid = tile_shape(tokens, d)
    tail_tensors, tail_numbers = tail_arguments(tail, addresses)
    numbers = (turn, first.stride(0), tokens, d, *tail_numbers, len(rooms), is_chosen, rows, cols)
    bound = BoundArguments((addresses, *tail_tensors), numbers)
    return KeptLaunch(push_peer_rows_kernel, grid, bound, WARPS)


def launch_push_peer_rows(
    x_TD: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    turn: int,
    room_s: Tensor | None = None,
    tail: ExchangeTail | None = None,
) -> None:
    is_chosen = room_s is not None
    launch = as_peer_rooms(rooms).keep_for_sizes(bind_push, x_TD.shape[0], turn, is_chosen, tail)
    launch(x_TD.contiguous(), slots_Ts, room_s if is_chosen else slots_Ts)
    note_given(tail)


def bind_sum_into(
    rooms: PeerRooms,
    rank: int,
    n: int,
    k: int,
    wide: tl.dtype,
    tail: ExchangeTail | None,
) -> KeptLaunch:
    room_ND = rooms[rank]
    d = room_ND.shape[1]
    rows, cols, grid = tile_shape(n, d)
    tail_tensors, tail_numbers = tail_arguments(tail, room_ND)
    bound = BoundArguments((room_ND, *tail_tensors), (n, d, *tail_numbers, k, rows, cols, wide))
    return KeptLaunch(sum_rows_into_kernel, grid, bound, WARPS)


def launch_sum_rows_into(
    y_RD: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    n, k = slots_NK.shape
    if not n:
        return
    launch = as_peer_rooms(rooms).keep_for_sizes(bind_sum_into, rank, n, k, wide_type(y_RD.dtype), tail)
    launch(y_RD.contiguous(), slots_NK.contiguous())
    note_given(tail)


def bind_write_choices(rooms: PeerRooms, rank: int, n: int, k: int, tail: ExchangeTail | None) -> KeptLaunch:
    room_NK = rooms[rank]
    tail_tensors, tail_numbers = tail_arguments(tail, room_NK)
    bound = BoundArguments((room_NK, *tail_tensors), (n * k, *tail_numbers, NUMBERS))
    return KeptLaunch(write_choices_into_kernel, (triton.cdiv(n * k, NUMBERS),), bound, WARPS)


def launch_write_choices_into(
    x_R: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    n, k = slots_NK.shape
    if not n:
        return
    launch = as_peer_rooms(rooms).keep_for_sizes(bind_write_choices, rank, n, k, tail)
    launch(x_R.contiguous(), slots_NK.contiguous())
    note_given(tail)


def bind_sum(rooms: PeerRooms, tokens: int) -> KeptLaunch:
    first = rooms[0]
    d = first.shape[1]
    rows, cols, grid = tile_shape(tokens, d)
    numbers = (tokens, d, len(rooms), rows, cols, wide_type(first.dtype))
    bound = BoundArguments((address_table(rooms),), numbers)
    return KeptLaunch(sum_peer_rows_kernel, grid, bound, WARPS)


def launch_sum_peer_rows(rooms: list[Tensor], slots_Ts: Tensor) -> Tensor:
    tokens = slots_Ts.shape[0]
    like = rooms[0]
    out_TD = like.new_empty(tokens, like.shape[1])
    if tokens:
        launch = as_peer_rooms(rooms).keep_for_sizes(bind_sum, tokens)
        launch(slots_Ts, out_TD)
    return out_TD


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """The type that rows are summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
