"""Products of dense layers while heads of other ranks arrive, in Triton. Imported only where Triton is.

A kernel of as many programs as the device has processors. The first few write rows of this rank's heads into the rooms
of the ranks whose rows they are, block by block, and set a flag there for each: the first block of each rank, then the
second, and so on; rank i begins with i - 1 and goes on with i - 2, so that ranks send to different ones at a time. All
others, and those that have sent all, take tiles of the result. A tile sums over this rank's heads first, read where
they lie, then over those of the next rank, which arrive first, and so on; it waits for the block of its rows in front
of each.

Programs that send wait for nobody, and come first: tiles that wait for them cannot keep them from running. A tile's
sums are in one order whatever arrives first, so that two runs have the same bits.

T rows of this rank, C of all ranks, H columns of a rank's heads in a layer, N outputs, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.experts.arriving_tiles_triton import locate_tile, take_number
from moefold.kernels.linear.gathered_product_triton import SENT_COLUMNS, SENT_ROWS
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.linear.shard_tiles_triton import (
    LAYERS,
    TILES,
    TileSizes,
    await_flags,
    can_describe,
    exchange_tables,
    filled,
    layer_weights,
    multiply_boxes,
    multiply_rows,
    order_for_copies,
    row_boxes,
    rows_of_tile,
    tiles_of,
    time_tables,
)
from moefold.kernels.routing.peer_rows_triton import load_room
from moefold.kernels.routing.peer_signals_triton import as_words, lanes_of, load_words, patience_limit
from moefold.kernels.routing.piece_signals_triton import (
    end_receiving,
    end_sending,
    give_piece,
    note_time,
    note_waits,
    read_time,
)
from moefold.kernels.routing.rows_triton import columns_of_program
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

COUNTERS = 3  # programs that have sent, programs that have finished, tiles that are taken


@triton.jit
def send_heads(x_CH, H, begin, room, width, block, T, BLOCK: constexpr, ROWS: constexpr, COLS: constexpr):
    """A block of a rank's rows, of which it has the first at `begin` among all."""
    for row in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, T), ROWS):
        t = numbers_from(row, ROWS).to(tl.int64)
        for column in range(0, H, COLS):
            h = numbers_from(column, COLS)
            inside = tile_mask(t < T, h < H)
            x = load_or_zero(tile_pointers(x_CH, begin + t, h, H), inside)
            store_inside(tile_pointers(room, t, h, width), x, inside)


@triton.jit
def send_blocks(
    x0,
    x1,
    x2,
    begins,
    addresses,
    flags,
    peers,
    counters,
    piece_times,
    ticks,
    H0,
    H1,
    H2,
    width,
    tile_rows,
    flags_of_sender,
    me,
    number,
    senders,
    LAYERS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """What one of the first programs sends. `tile_rows`: blocks of the rank that has most."""
    program = tl.program_id(0)
    if program < senders:
        others: constexpr = max(RANKS - 1, 1)
        for unit in range(program, (RANKS - 1) * tile_rows, senders):
            to = (me + RANKS - 1 - unit % others) % RANKS
            block = unit // others
            begin = tl.load(begins + to)
            T = tl.load(begins + to + 1) - begin
            if block * BLOCK < T:
                note_time(piece_times, unit, 0, ticks, RECORDS, CLOCKED)
                note_time(piece_times, unit, 1, ticks, RECORDS, CLOCKED)
                room = load_room(addresses, to, x0)
                send_heads(x0, H0, begin, room + me * H0, width, block, T, BLOCK, ROWS, COLS)
                room += RANKS * H0
                if LAYERS > 1:
                    send_heads(x1, H1, begin, room + me * H1, width, block, T, BLOCK, ROWS, COLS)
                    room += RANKS * H1
                if LAYERS > 2:
                    send_heads(x2, H2, begin, room + me * H2, width, block, T, BLOCK, ROWS, COLS)
                give_piece(flags, to, me * flags_of_sender + block, number)
                note_time(piece_times, unit, 2, ticks, RECORDS, CLOCKED)
        end_sending(peers, number, counters, me, senders, RANKS, WIDTH)


@triton.jit
def multiply_heads(
    total,
    x,
    box,
    row,
    box_row,
    x_first,
    x_stride,
    w,
    n,
    column,
    rank,
    H,
    N,
    w_stride,
    DESCRIBED: constexpr,
    TURNED: constexpr,
    EVEN: constexpr,
    DEPTH: constexpr,
):
    """The sum so far, plus the product over a rank's heads of a layer, whose columns of x begin at `x_first`."""
    w_first = rank * H
    if DESCRIBED:
        total = multiply_boxes(total, box, box_row, x_first, w, column, w_first, H, TURNED, DEPTH)
    else:
        w_step = w_stride if TURNED else 1
        w_from = w + w_first.to(tl.int64) * w_step
        total = multiply_rows(total, x + x_first, row, x_stride, w_from, n, H, N, w_stride, TURNED, EVEN, DEPTH)
    return total


@triton.jit(do_not_specialize=["tile_rows", "most_tile_rows", "flags_of_sender", "me", "senders"])
def from_heads_kernel(
    x0,
    x1,
    x2,
    x_box0,
    x_box1,
    x_box2,
    room_box0,
    room_box1,
    room_box2,
    w0,
    w1,
    w2,
    y_TN,
    begins,
    addresses,
    flags,
    words,
    fault_2,
    counters,
    tile_times,
    piece_times,
    ticks,
    H0,
    H1,
    H2,
    stride0,
    stride1,
    stride2,
    width,
    N,
    tile_rows,
    most_tile_rows,
    flags_of_sender,
    me,
    patience,
    senders,
    LAYERS: constexpr,
    SENDS: constexpr,
    MULTIPLIES: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    DESCRIBED: constexpr,
    TURNED: constexpr,
    EVEN: constexpr,
    SENT_ROWS: constexpr,
    SENT_COLUMNS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    BAND: constexpr,
):
    """`width`: of a room, which has all ranks' heads of each layer. SENDS, MULTIPLIES: the parts of the exchange that
    this launch has; both, but where ranks are played in turns. DESCRIBED: weights, own rows and the room of each layer
    are descriptors."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    if SENDS:
        send_blocks(
            x0,
            x1,
            x2,
            begins,
            addresses,
            flags,
            peers,
            counters,
            piece_times,
            ticks,
            H0,
            H1,
            H2,
            width,
            most_tile_rows,
            flags_of_sender,
            me,
            number,
            senders,
            LAYERS,
            RANKS,
            WIDTH,
            CLOCKED,
            RECORDS,
            ROWS,
            SENT_ROWS,
            SENT_COLUMNS,
        )
    if MULTIPLIES:
        own_words = as_words(own_address)
        own_flags = as_words(tl.load(flags + me))
        room = load_room(addresses, me, y_TN)
        lane = tl.arange(0, WIDTH)
        begin = tl.load(begins + me)
        T = tl.load(begins + me + 1) - begin
        tile_columns = tl.cdiv(N, COLUMNS)
        in_room1 = RANKS * H0
        in_room2 = RANKS * (H0 + H1)
        tile = take_number(counters + 2)
        while tile < tile_rows * tile_columns:
            following = take_number(counters + 2)
            block, column = locate_tile(tile, tile_rows, tile_columns, BAND)
            row, is_row = rows_of_tile(block, T, ROWS)
            at_column = column * COLUMNS
            n = numbers_from(at_column, COLUMNS)
            begun = read_time(ticks, RECORDS, CLOCKED)
            # own heads
            own_row = begin + row
            at_row = begin + block * ROWS
            zero = block * 0
            total = fp32_zeros(ROWS, COLUMNS)
            total = multiply_heads(
                total, x0, x_box0, own_row, at_row, zero, H0, w0, n, at_column, me, H0, N, stride0,
                DESCRIBED, TURNED, EVEN, DEPTH,
            )  # fmt: skip
            if LAYERS > 1:
                total = multiply_heads(
                    total, x1, x_box1, own_row, at_row, zero, H1, w1, n, at_column, me, H1, N, stride1,
                    DESCRIBED, TURNED, EVEN, DEPTH,
                )  # fmt: skip
            if LAYERS > 2:
                total = multiply_heads(
                    total, x2, x_box2, own_row, at_row, zero, H2, w2, n, at_column, me, H2, N, stride2,
                    DESCRIBED, TURNED, EVEN, DEPTH,
                )  # fmt: skip
            # those of others, each behind its flag
            waited = tl.zeros([], tl.int64)
            for turn in range(1, RANKS):
                rank = (me + turn) % RANKS
                waits_from = read_time(ticks, RECORDS, CLOCKED)
                is_lost = await_flags(
                    own_flags,
                    block,
                    lane,
                    lane == rank,
                    number,
                    is_lost,
                    own_words,
                    fault_2,
                    flags_of_sender,
                    patience,
                    RANKS,
                    WIDTH,
                    CLOCKED,
                )
                waited += read_time(ticks, RECORDS, CLOCKED) - waits_from
                at_row = block * ROWS
                if DESCRIBED:
                    at_row = order_for_copies(at_row, CLOCKED)
                total = multiply_heads(
                    total, room, room_box0, row, at_row, rank * H0, width, w0, n, at_column, rank, H0, N, stride0,
                    DESCRIBED, TURNED, EVEN, DEPTH,
                )  # fmt: skip
                if LAYERS > 1:
                    total = multiply_heads(
                        total, room + in_room1, room_box1, row, at_row, rank * H1, width, w1, n, at_column, rank, H1,
                        N, stride1, DESCRIBED, TURNED, EVEN, DEPTH,
                    )  # fmt: skip
                if LAYERS > 2:
                    total = multiply_heads(
                        total, room + in_room2, room_box2, row, at_row, rank * H2, width, w2, n, at_column, rank, H2,
                        N, stride2, DESCRIBED, TURNED, EVEN, DEPTH,
                    )  # fmt: skip
            # epilogue
            at = tile_pointers(y_TN, row.to(tl.int64), n, N)
            store_inside(at, total.to(y_TN.dtype.element_ty), tile_mask(is_row, n < N))
            note_waits(tile_times, tile, begun, waited, ticks, RECORDS, CLOCKED)
            tile = following
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


class FromHeadsLaunch(NamedTuple):
    """The arguments of a launch but for its parts, and the result that it writes."""

    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    layers: int
    constants: tuple[int, ...]
    options: dict[str, int]
    y_TN: Tensor

    def run(self, programs: int, sends: bool = True, multiplies: bool = True) -> None:
        parts = (self.layers, sends, multiplies)
        kernel = from_heads_kernel[(programs,)]
        kernel(*self.tensors, *self.numbers, *parts, *self.constants, **self.options)


def bind_from_heads(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> FromHeadsLaunch:
    assert len(weights) <= LAYERS, f"{len(weights)} layers in a launch of {LAYERS}"
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    like = inputs[0]
    sizes = sizes or TILES[like.element_size()]
    tail = signals.tail
    ranks = len(rooms)
    outputs = len(weights[0])
    y_TN = like.new_empty(exchange.shards[exchange.me], outputs)
    shares = [x_CH.shape[1] for x_CH in inputs]
    tile_rows = tiles_of(exchange.shards, sizes.rows)
    assert max(tile_rows) <= exchange.flags, f"{max(tile_rows)} blocks of a rank, flags of {exchange.flags}"
    rows = [x_CH.contiguous() for x_CH in inputs]
    even = all(share % sizes.depth == 0 for share in shares)
    described = sizes.described and even and can_describe(exchange.rows, outputs)
    matrices = layer_weights(weights, sizes, described)
    boxes = described_rows(rows, rooms[exchange.me], ranks, sizes) if described else [None] * (2 * LAYERS)
    tables = exchange_tables(rooms, exchange, COUNTERS)
    tensors = (*filled(rows), *boxes, *matrices.operands, y_TN, *tables, *time_tables(signals))
    clocked = like.is_cuda
    limit = patience_limit(tail.patience, clocked)
    places = (tile_rows[exchange.me], max(tile_rows), exchange.flags, exchange.me, limit, signals.senders)
    numbers = (*filled(shares), *matrices.strides, ranks * sum(shares), outputs, *places)
    flags = (ranks, lanes_of(ranks), clocked, signals.records is not None)
    forms = (described, matrices.turned, even, SENT_ROWS, columns_of_program(max(shares), SENT_COLUMNS))
    constants = (*flags, *forms, sizes.rows, sizes.columns, sizes.depth, sizes.band)
    return FromHeadsLaunch(tensors, numbers, len(weights), constants, sizes.options, y_TN)


def described_rows(rows: list[Tensor], room: Tensor, ranks: int, sizes: TileSizes) -> list[Any]:
    """Descriptors of own rows of each layer, and of the layer's part of the room."""
    widths = [ranks * x_CH.shape[1] for x_CH in rows]
    arriving: Sequence[Tensor] = torch.split(room, widths, 1)
    return [*filled([row_boxes(x, sizes) for x in rows]), *filled([row_boxes(x, sizes) for x in arriving])]


def launch_from_heads(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> Tensor:
    """(T, N) of this rank, and heads of all others in `rooms[me]`. The end of the exchange is signalled and waited for
    by the kernel."""
    launch = bind_from_heads(inputs, weights, rooms, exchange, sizes)
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    signals.tail.is_given = True
    if signals.apart:
        launch.run(signals.senders, multiplies=False)
        exchange.end()
        launch.run(signals.programs, sends=False)
    else:
        launch.run(signals.programs)
        exchange.end()
    return launch.y_TN
