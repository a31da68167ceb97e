"""Products of dense layers while rows of other ranks arrive, in Triton. Imported only where Triton is.

A kernel of as many programs as the device has processors. The first few write this rank's rows into the rooms of the
others, block by block, and set a flag there for each; rank i begins with i - 1 and goes on with i - 2, so that ranks
send to different ones at a time. All others, and those that have sent all, take tiles: of this rank's own rows first,
read where they lie, then of those of the next rank, which arrive first. A tile waits for the block of its rows.

Programs that send wait for nobody, and come first: tiles that wait for them cannot keep them from running. A tile's
sums are in one order whatever arrives first, so that two runs have the same bits.

T rows of this rank, C of all ranks, D inputs, N outputs of a layer, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from moefold.kernels.experts.arriving_tiles_triton import locate_tile, take_number
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.linear.shard_tiles_triton import (
    LAYERS,
    TILES,
    TileSizes,
    await_flags,
    begin_table,
    can_describe,
    filled,
    layer_weights,
    locate_shard,
    multiply_boxes,
    multiply_rows,
    order_for_copies,
    row_boxes,
    rows_of_tile,
    tiles_of,
)
from moefold.kernels.routing.peer_rows_triton import address_table, load_room
from moefold.kernels.routing.peer_signals_triton import as_words, lanes_of, load_words, patience_limit
from moefold.kernels.routing.piece_signals_triton import end_receiving, end_sending, give_piece, note_time
from moefold.kernels.routing.rows_triton import columns_of_program
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

SENT_ROWS = 16  # rows that are sent at a time
SENT_COLUMNS = 1024
COUNTERS = 3  # programs that have sent, programs that have finished, tiles that are taken


@triton.jit
def send_block(x_TD, room, begin, number, T, D, BLOCK: constexpr, ROWS: constexpr, COLS: constexpr):
    """Some rows of this rank, where they stand among all."""
    for row in range(number * BLOCK, tl.minimum(number * BLOCK + BLOCK, T), ROWS):
        t = numbers_from(row, ROWS).to(tl.int64)
        for column in range(0, D, COLS):
            c = numbers_from(column, COLS)
            inside = tile_mask(t < T, c < D)
            x = load_or_zero(tile_pointers(x_TD, t, c, D), inside)
            store_inside(tile_pointers(room, begin + t, c, D), x, inside)


@triton.jit
def send_rows(
    x_TD,
    begins,
    addresses,
    flags,
    peers,
    counters,
    piece_times,
    ticks,
    D,
    flags_of_sender,
    me,
    number,
    senders,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """What one of the first programs sends: blocks for the rank before this one, then for the one before that, and so
    on."""
    program = tl.program_id(0)
    if program < senders:
        begin = tl.load(begins + me)
        T = tl.load(begins + me + 1) - begin
        blocks = tl.cdiv(T, BLOCK)
        for unit in range(program, (RANKS - 1) * blocks, senders):
            to = (me + RANKS - 1 - unit // blocks) % RANKS
            block = unit % blocks
            note_time(piece_times, unit, 0, ticks, RECORDS, CLOCKED)
            note_time(piece_times, unit, 1, ticks, RECORDS, CLOCKED)
            room = load_room(addresses, to, x_TD)
            send_block(x_TD, room, begin, block, T, D, BLOCK, ROWS, COLS)
            give_piece(flags, to, me * flags_of_sender + block, number)
            note_time(piece_times, unit, 2, ticks, RECORDS, CLOCKED)
        end_sending(peers, number, counters, me, senders, RANKS, WIDTH)


@triton.jit(do_not_specialize=["END0", "END1", "END2", "tile_rows", "flags_of_sender", "me", "senders"])
def gathered_product_kernel(
    x_TD,
    x_box,
    room_box,
    begins,
    addresses,
    flags,
    words,
    fault_2,
    counters,
    w0,
    w1,
    w2,
    y0,
    y1,
    y2,
    tile_times,
    piece_times,
    ticks,
    D,
    N0,
    N1,
    N2,
    stride0,
    stride1,
    stride2,
    END0,
    END1,
    END2,
    tile_rows,
    flags_of_sender,
    me,
    patience,
    senders,
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
    """END0, END1, END2: where the columns of tiles of each layer end. SENDS, MULTIPLIES: the parts of the exchange that
    this launch has; both, but where ranks are played in turns. DESCRIBED: weights are descriptors, as `x_box` and
    `room_box` are. All layers share the main loop."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    if SENDS:
        send_rows(
            x_TD,
            begins,
            addresses,
            flags,
            peers,
            counters,
            piece_times,
            ticks,
            D,
            flags_of_sender,
            me,
            number,
            senders,
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
        room = load_room(addresses, me, x_TD)
        lane = tl.arange(0, WIDTH)
        tile = take_number(counters + 2)
        while tile < tile_rows * END2:
            following = take_number(counters + 2)
            # the tile: its rows
            m, column = locate_tile(tile, tile_rows, END2, BAND)
            shard, block, begin, rows = locate_shard(begins, m, me, RANKS, ROWS)
            row, is_row = rows_of_tile(block, rows, ROWS)
            # its layer
            w = w0
            y = y0
            N = N0
            stride = stride0
            if column >= END1:
                w = w2
                y = y2
                N = N2
                stride = stride2
                column -= END1
            elif column >= END0:
                w = w1
                y = y1
                N = N1
                stride = stride1
                column -= END0
            # wait for rows of others
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
            is_awaited = (lane == shard) & (shard != me)
            is_lost = await_flags(
                own_flags,
                block,
                lane,
                is_awaited,
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
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            # main loop over the inputs
            n = numbers_from(column * COLUMNS, COLUMNS)
            total = fp32_zeros(ROWS, COLUMNS)
            if DESCRIBED:
                box = room_box
                first = order_for_copies(begin, CLOCKED)
                if shard == me:
                    box = x_box
                    first = begin * 0
                total = multiply_boxes(total, box, first + block * ROWS, 0, w, column * COLUMNS, 0, D, TURNED, DEPTH)
            else:
                source = room + begin.to(tl.int64) * D
                if shard == me:
                    source = x_TD
                source = tl.multiple_of(source, 16)
                total = multiply_rows(total, source, row, D, w, n, D, N, stride, TURNED, EVEN, DEPTH)
            # epilogue
            at = tile_pointers(y, (begin + row).to(tl.int64), n, N)
            store_inside(at, total.to(x_TD.dtype.element_ty), tile_mask(is_row, n < N))
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
            tile = following
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


class GatherLaunch(NamedTuple):
    """The arguments of a launch but for its parts, and the results that it writes."""

    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    constants: tuple[int, ...]
    options: dict[str, int]
    outputs: tuple[Tensor, ...]

    def run(self, programs: int, sends: bool = True, multiplies: bool = True) -> None:
        kernel = gathered_product_kernel[(programs,)]
        kernel(*self.tensors, *self.numbers, sends, multiplies, *self.constants, **self.options)


def bind_gathered_product(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> GatherLaunch:
    assert len(weights) <= LAYERS, f"{len(weights)} layers in a launch of {LAYERS}"
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    sizes = sizes or TILES[x_TD.element_size()]
    tail = signals.tail
    ranks = len(rooms)
    x_TD = x_TD.contiguous()
    room_CD = rooms[exchange.me]
    d = x_TD.shape[1]
    widths = [len(weight) for weight in weights]
    described = sizes.described and can_describe(exchange.rows, d, *widths)
    boxes: list[TensorDescriptor | None] = [None, None]
    if described:
        boxes = [row_boxes(x if len(x) else room_CD, sizes) for x in (x_TD, room_CD)]
    matrices = layer_weights(weights, sizes, described)
    outputs = [x_TD.new_empty(exchange.rows, width) for width in widths]
    columns = [triton.cdiv(width, sizes.columns) for width in widths]
    ends = [sum(columns[: layer + 1]) for layer in range(len(columns))]
    tile_rows = tiles_of(exchange.shards, sizes.rows)
    assert max(tile_rows) <= exchange.flags, f"{max(tile_rows)} blocks of a rank, flags of {exchange.flags}"
    clocked = x_TD.is_cuda
    records = signals.records
    times = (tail.addresses,) * 3 if records is None else tuple(records)
    table = (begin_table(rooms, exchange.shards), address_table(rooms), signals.flags, tail.addresses, tail.fault_2)
    counters = table[0].new_zeros(COUNTERS)
    tensors = (x_TD, *boxes, *table, counters, *matrices.operands, *filled(outputs), *times)
    limit = patience_limit(tail.patience, clocked)
    places = (sum(tile_rows), exchange.flags, exchange.me, limit, signals.senders)
    numbers = (d, *filled(widths), *matrices.strides, *filled(ends), *places)
    flags = (ranks, lanes_of(ranks), clocked, records is not None)
    forms = (described, matrices.turned, d % sizes.depth == 0, SENT_ROWS, columns_of_program(d, SENT_COLUMNS))
    constants = (*flags, *forms, sizes.rows, sizes.columns, sizes.depth, sizes.band)
    return GatherLaunch(tensors, numbers, constants, sizes.options, tuple(outputs))


def launch_gathered_product(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> tuple[Tensor, ...]:
    """(C, N) of each layer, and rows of all others in `rooms[me]`. The end of the exchange is signalled and waited for
    by the kernel."""
    launch = bind_gathered_product(x_TD, weights, rooms, exchange, sizes)
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
    return launch.outputs
