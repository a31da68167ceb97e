"""The first product of experts while its rows arrive, in Triton. Imported only where Triton is.

A kernel of as many programs as the device has processors. The first few send this rank's tokens, piece by piece, to
one rank after the other, and set a flag there for each piece; rank i begins with itself and goes on with i - 1, so that
ranks send to different ones at a time, and what arrives first comes from the rank itself, then from the next. All
others, and those that have sent all, take tiles in that order. A tile waits for the pieces that its rows come from,
gathers the rows where they have been written, and multiplies them with gate and up:

    h = x W_gate_up     a = silu(gate) * up * weight

A tile's sums are in one order whatever arrives first, so that two runs have the same bits. Programs that send wait for
nobody, and come first: tiles that wait for them cannot keep them from running.

T tokens of this rank, R rows of experts, D width, F inner width, P pieces, M tiles, s ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.anatomy.announced_choices import BLOCK_TOKENS
from moefold.kernels.experts.arriving_tiles_triton import (
    BAND,
    load_tile,
    locate_tile,
    order_tiles,
    take_number,
)
from moefold.kernels.experts.few_rows_triton import multiply_gate_up
from moefold.kernels.routing.arrival_pieces import TileExchange
from moefold.kernels.routing.peer_rows_triton import address_table, load_room, load_slots
from moefold.kernels.routing.peer_signals_triton import as_words, lanes_of, load_words, patience_limit
from moefold.kernels.routing.piece_signals_triton import (
    await_pieces,
    end_receiving,
    end_sending,
    give_piece,
    note_time,
)
from moefold.kernels.routing.rows_triton import TILE, columns_of_program
from moefold.kernels.tile_triton import (
    load_as_fp32,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

COLUMNS = 128  # inner columns of a tile: so many rows of gate, and so many of up
DEPTH = 64
SENT_ROWS = 16  # tokens that are sent at a time
SENT_COLUMNS = 1024
OPTIONS = {"num_warps": 8, "num_stages": 4}
BY_LAST = True  # the order of tiles: rows of the last rank that a tile waits for come last
COUNTERS = 3  # programs that have sent, programs that have finished, tiles that are taken


@triton.jit
def send_piece(
    x_TD,
    slots_Ts,
    addresses,
    flags,
    first_entry,
    to,
    block,
    me,
    number,
    T,
    D,
    blocks,
    RANKS: constexpr,
    PIECE: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """The tokens of a block that go to a rank, and the flag of their piece."""
    room = load_room(addresses, to, x_TD) + first_entry
    for begin in range(0, PIECE, ROWS):
        t = numbers_from(block * PIECE + begin, ROWS).to(tl.int64)
        slot = load_slots(slots_Ts, t, to, t < T, RANKS)
        goes = slot >= 0
        for column in range(0, D, COLS):
            c = numbers_from(column, COLS)
            inside = tile_mask(goes, c < D)
            x = load_or_zero(tile_pointers(x_TD, t, c, D), inside)
            store_inside(tile_pointers(room, slot, c, D), x, inside)
    give_piece(flags, to, me * blocks + block, number)


@triton.jit
def pieces_of_rows(n, ends_P, PIECES: constexpr, ALL: constexpr):
    """The first and the last piece of arrived rows, of which -1 is none."""
    piece = tl.arange(0, ALL)
    ends = tl.load(ends_P + piece, mask=piece < PIECES, other=2147483647)
    last_row = tl.max(n)
    first_row = tl.min(tl.where(n >= 0, n, 2147483647))
    first = tl.sum((ends <= first_row).to(tl.int32))
    last = tl.sum((ends <= last_row).to(tl.int32))
    return first, tl.where(last_row >= 0, last, -1)


@triton.jit
def store_activation(h_R2F, a_RF, weight_R, gate, up, r, is_row, f, F):
    """The pre-activation, rounded, and the activation of what it was rounded to, times the router's weight."""
    inside = tile_mask(is_row, f < F)
    rounded_gate = gate.to(h_R2F.dtype.element_ty)
    rounded_up = up.to(h_R2F.dtype.element_ty)
    at = tile_pointers(h_R2F, r, f, 2 * F)
    store_inside(at, rounded_gate, inside)
    store_inside(at + F, rounded_up, inside)
    g = rounded_gate.to(tl.float32)
    weight = load_as_fp32(weight_R + r, is_row)
    a = g * tl.sigmoid(g) * rounded_up.to(tl.float32) * weight[:, None]
    store_inside(tile_pointers(a_RF, r, f, F), a.to(a_RF.dtype.element_ty), inside)


@triton.jit
def send_tokens(
    x_TD,
    slots_Ts,
    addresses,
    flags,
    peers,
    counters,
    piece_times,
    ticks,
    first_entry,
    me,
    number,
    T,
    D,
    blocks,
    SENDERS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    PIECE: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """What one of the first programs sends: pieces for this rank, then for the one before it, and so on."""
    program = tl.program_id(0)
    if program < SENDERS:
        for unit in range(program, RANKS * blocks, SENDERS):
            to = (me + RANKS - unit // blocks) % RANKS
            block = unit % blocks
            note_time(piece_times, unit, 0, ticks, RECORDS, CLOCKED)
            note_time(piece_times, unit, 1, ticks, RECORDS, CLOCKED)
            send_piece(
                x_TD,
                slots_Ts,
                addresses,
                flags,
                first_entry,
                to,
                block,
                me,
                number,
                T,
                D,
                blocks,
                RANKS,
                PIECE,
                ROWS,
                COLS,
            )
            note_time(piece_times, unit, 2, ticks, RECORDS, CLOCKED)
        end_sending(peers, number, counters, me, SENDERS, RANKS, WIDTH)


@triton.jit(do_not_specialize=["T", "me"])
def arriving_rows_kernel(
    x_TD,
    slots_Ts,
    addresses,
    flags,
    words,
    fault_2,
    counters,
    gate_up,
    weight_R,
    index_R,
    ends_P,
    tiles_M4,
    count,
    h_R2F,
    a_RF,
    tile_times,
    piece_times,
    ticks,
    first_entry,
    T,
    D,
    F,
    blocks,
    me,
    patience,
    SENDS: constexpr,
    MULTIPLIES: constexpr,
    SENDERS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    PIECES: constexpr,
    ALL: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    PIECE: constexpr,
    SENT_ROWS: constexpr,
    SENT_COLUMNS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    BAND: constexpr,
):
    """SENDS, MULTIPLIES: the parts of the exchange that this launch has; both, but where ranks are played in turns."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    if SENDS:
        send_tokens(
            x_TD,
            slots_Ts,
            addresses,
            flags,
            peers,
            counters,
            piece_times,
            ticks,
            first_entry,
            me,
            number,
            T,
            D,
            blocks,
            SENDERS,
            RANKS,
            WIDTH,
            CLOCKED,
            RECORDS,
            PIECE,
            SENT_ROWS,
            SENT_COLUMNS,
        )
    if MULTIPLIES:
        own_words = as_words(own_address)
        own_flags = as_words(tl.load(flags + me))
        source_ND = load_room(addresses, me, x_TD) + first_entry
        tile_rows = tl.load(count)
        tile_columns = tl.cdiv(F, COLUMNS)
        tile = take_number(counters + 2)
        while tile < tile_rows * tile_columns:
            # the tile: its expert and its rows
            m, column = locate_tile(tile, tile_rows, tile_columns, BAND)
            expert, row, real = load_tile(tiles_M4, m)
            r = tl.arange(0, ROWS)
            is_row = r < real
            r = r + row.to(tl.int64)
            n = tl.load(index_R + r, mask=is_row, other=-1)
            # the pieces that they come from
            first, last = pieces_of_rows(n, ends_P, PIECES, ALL)
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
            is_lost = await_pieces(
                own_flags, first, last, number, is_lost, own_words, fault_2, blocks, patience, RANKS, ALL, CLOCKED
            )
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            # products and activation
            f = numbers_from(column * COLUMNS, COLUMNS)
            token = n.to(tl.int64)
            gate, up = multiply_gate_up(source_ND, token, n >= 0, gate_up, expert, f, D, F, ROWS, COLUMNS, DEPTH)
            store_activation(h_R2F, a_RF, weight_R, gate, up, r, is_row, f, F)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
            tile = take_number(counters + 2)
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


def launch_arriving_rows(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    ends_E: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> tuple[Tensor, Tensor]:
    """The pre-activation h_R2F and the activation times the router's weight, a_RF. The end of the exchange is signalled
    and waited for by the kernel."""
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    tail = signals.tail
    tokens, d = x_TD.shape
    _, _, f, _ = gate_up_E2FD.shape
    rows = len(index_R)
    ranks = len(rooms)
    ends_P = exchange.pieces.ends_P
    pieces = len(ends_P)
    h_R2F = x_TD.new_empty(rows, 2, f)
    a_RF = x_TD.new_empty(rows, f)
    tiles = order_tiles(index_R, ends_E, ends_P, exchange.me, ranks, BY_LAST)
    counters = ends_P.new_zeros(COUNTERS)
    clocked = x_TD.is_cuda
    records = signals.records
    times = (tail.addresses,) * 3 if records is None else tuple(records)
    addresses = address_table(rooms)
    first_entry = exchange.turn * rooms[0].stride(0)
    sent_columns = columns_of_program(d, SENT_COLUMNS)
    limit = patience_limit(tail.patience, clocked)
    sent = (x_TD.contiguous(), slots_Ts.contiguous(), addresses, signals.flags, tail.addresses, tail.fault_2)
    multiplied = (gate_up_E2FD, weight_R, index_R, ends_P, *tiles, h_R2F, a_RF, *times)
    numbers = (first_entry, tokens, d, f, pieces // ranks, exchange.me, limit)
    widths = (ranks, lanes_of(ranks), pieces, lanes_of(pieces))
    sizes = (BLOCK_TOKENS, SENT_ROWS, sent_columns, TILE, COLUMNS, DEPTH, BAND)
    constants = (signals.senders, *widths, clocked, records is not None, *sizes)

    def launch(programs: int, sends: bool, multiplies: bool) -> None:
        kernel = arriving_rows_kernel[(programs,)]
        kernel(*sent, counters, *multiplied, *numbers, sends, multiplies, *constants, **OPTIONS)

    tail.is_given = True
    if signals.apart:
        launch(signals.senders, True, False)
        exchange.end()
        launch(signals.programs, False, True)
    else:
        launch(signals.programs, True, True)
        exchange.end()
    return h_R2F, a_RF
