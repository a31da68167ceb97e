"""Products of dense layers whose columns are sent to the ranks of their heads while they are made, in Triton. Imported
only where Triton is.

Programs take tiles: of the next rank's heads first, then of those of the rank behind it, and of this rank's own last. A
tile of another rank is written into the room of that rank, and a flag there is set for it; one of this rank is written
where it lies in the result. Then programs take tiles that other ranks have made for this one: each waits for its flag
and is copied to the result, since the next exchange but one overwrites the room.

Tiles that are made wait for nobody, and come first: tiles that wait cannot keep them from running.

T rows of this rank, C of all ranks, D inputs, H columns of a rank's heads in a layer, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.experts.arriving_tiles_triton import locate_tile, take_number
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
    locate_shard,
    multiply_boxes,
    multiply_rows,
    of_layer,
    row_boxes,
    rows_of_tile,
    tiles_of,
    time_tables,
)
from moefold.kernels.routing.peer_rows_triton import load_room
from moefold.kernels.routing.peer_signals_triton import as_words, lanes_of, load_words, patience_limit
from moefold.kernels.routing.piece_signals_triton import end_receiving, end_sending, give_piece, note_time
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

COUNTERS = 5  # tiles that are sent, programs that have finished, tiles that are taken, those of own alone, those copied


@triton.jit(do_not_specialize=["END0", "END1", "END2", "tile_rows", "copied_rows", "flags_of_sender", "me"])
def to_heads_kernel(
    x,
    w0,
    w1,
    w2,
    y0,
    y1,
    y2,
    made,
    begins,
    addresses,
    flags,
    words,
    fault_2,
    counters,
    tile_times,
    piece_times,
    ticks,
    D,
    H0,
    H1,
    H2,
    stride0,
    stride1,
    stride2,
    width,
    END0,
    END1,
    END2,
    tile_rows,
    copied_rows,
    flags_of_sender,
    me,
    patience,
    MULTIPLIES: constexpr,
    SENDS: constexpr,
    KEEPS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    DESCRIBED: constexpr,
    TURNED: constexpr,
    EVEN: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    BAND: constexpr,
):
    """END0, END1, END2: where the columns of tiles of each layer end, among those of a rank. `width`: of a room, which
    has the heads of all layers. MULTIPLIES: tiles are products; otherwise those of others are read from `made`, which
    has the heads of all ranks side by side. SENDS, KEEPS: tiles of other ranks, and those of this one; with neither all
    products are written to `made`. A launch has all three, but where ranks are played in turns, or parts are timed.
    DESCRIBED: inputs and weights are descriptors. All layers share the main loop."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    own_begin = tl.load(begins + me)
    own_rows = tl.load(begins + me + 1) - own_begin
    of_rank = tile_rows * END2
    sent = (RANKS - 1) * of_rank
    last = sent + of_rank
    first = tl.zeros_like(sent)
    EXCHANGES: constexpr = SENDS or KEEPS
    if EXCHANGES and not (KEEPS and MULTIPLIES):
        last = sent
    if EXCHANGES and not SENDS:
        first = sent
    if SENDS and tl.program_id(0) == 0:
        # a part more than tiles, so that a rank without tiles for others signals too
        end_sending(peers, number, counters, me, sent + 1, RANKS, WIDTH)
    taken = counters + (2 if SENDS or not KEEPS else 3)
    tile = first + take_number(taken)
    while tile < last:
        following = first + take_number(taken)
        # the tile: whose heads
        turn = tile // of_rank
        block, column = locate_tile(tile - turn * of_rank, tile_rows, END2, BAND)
        to = (me + 1 + turn) % RANKS
        row, is_row = rows_of_tile(block, own_rows, ROWS)
        piece = block * END2 + column
        # their layer
        w = of_layer(column, END0, END1, w0, w1, w2)
        y = of_layer(column, END0, END1, y0, y1, y2)
        H = of_layer(column, END0, END1, H0, H1, H2)
        stride = of_layer(column, END0, END1, stride0, stride1, stride2)
        in_room = of_layer(column, END0, END1, 0, H0, H0 + H1)
        h_first = (column - of_layer(column, END0, END1, 0, END0, END1)) * COLUMNS
        h = numbers_from(h_first, COLUMNS)
        inside = tile_mask(is_row, h < H)
        made_at = tile_pointers(made, row.to(tl.int64), to * width + in_room + h, RANKS * width)
        if not EXCHANGES:
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
        elif to != me:
            note_time(piece_times, tile, 0, ticks, RECORDS, CLOCKED)
        # main loop over the inputs
        total = fp32_zeros(ROWS, COLUMNS)
        first_column = to * H + h_first
        if MULTIPLIES and DESCRIBED:
            total = multiply_boxes(total, x, block * ROWS, 0, w, first_column, 0, D, TURNED, DEPTH)
        elif MULTIPLIES:
            n = numbers_from(first_column, COLUMNS)
            total = multiply_rows(total, x, row, D, w, n, D, RANKS * H, stride, TURNED, EVEN, DEPTH)
        else:
            total += load_as_fp32(made_at, inside)
        rounded = total.to(y0.dtype.element_ty)
        # epilogue
        if not EXCHANGES:
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            store_inside(made_at, rounded, inside)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
        elif to != me:
            note_time(piece_times, tile, 1, ticks, RECORDS, CLOCKED)
            room = load_room(addresses, to, y0)
            at = tile_pointers(room, (own_begin + row).to(tl.int64), in_room + h, width)
            store_inside(at, rounded, inside)
            give_piece(flags, to, me * flags_of_sender + piece, number)
            end_sending(peers, number, counters, me, sent + 1, RANKS, WIDTH)
            note_time(piece_times, tile, 2, ticks, RECORDS, CLOCKED)
        else:
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            at = tile_pointers(y, (own_begin + row).to(tl.int64), h, H)
            store_inside(at, rounded, inside)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
        tile = following
    if KEEPS:
        own_words = as_words(own_address)
        own_flags = as_words(tl.load(flags + me))
        own_room = load_room(addresses, me, y0)
        lane = tl.arange(0, WIDTH)
        tile = take_number(counters + 4)
        while tile < copied_rows * END2:
            following = take_number(counters + 4)
            m, column = locate_tile(tile, copied_rows, END2, BAND)
            sender, block, begin, rows = locate_shard(begins, m, me + 1, RANKS, ROWS)
            row, is_row = rows_of_tile(block, rows, ROWS)
            y = of_layer(column, END0, END1, y0, y1, y2)
            H = of_layer(column, END0, END1, H0, H1, H2)
            in_room = of_layer(column, END0, END1, 0, H0, H0 + H1)
            h_first = (column - of_layer(column, END0, END1, 0, END0, END1)) * COLUMNS
            h = numbers_from(h_first, COLUMNS)
            # wait for its maker
            line = sent + of_rank + tile
            note_time(tile_times, line, 0, ticks, RECORDS, CLOCKED)
            is_lost = await_flags(
                own_flags,
                block * END2 + column,
                lane,
                lane == sender,
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
            note_time(tile_times, line, 1, ticks, RECORDS, CLOCKED)
            inside = tile_mask(is_row, h < H)
            row_of_all = (begin + row).to(tl.int64)
            values = load_or_zero(tile_pointers(own_room, row_of_all, in_room + h, width), inside)
            store_inside(tile_pointers(y, row_of_all, h, H), values, inside)
            note_time(tile_times, line, 2, ticks, RECORDS, CLOCKED)
            tile = following
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


class ToHeadsLaunch(NamedTuple):
    """The arguments of a launch but for its parts, and the results that it writes."""

    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    constants: tuple[int, ...]
    programs: int
    options: dict[str, int]
    outputs: tuple[Tensor, ...]

    def run(self, multiplies: bool = True, sends: bool = True, keeps: bool = True) -> None:
        parts = (multiplies, sends, keeps)
        kernel = to_heads_kernel[(self.programs,)]
        kernel(*self.tensors, *self.numbers, *parts, *self.constants, **self.options)


def bind_to_heads(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
    made: Tensor | None = None,
) -> ToHeadsLaunch:
    """`made`: (T, s x sum of H), memory of products that are not sent or kept as they are made."""
    assert len(weights) <= LAYERS, f"{len(weights)} layers in a launch of {LAYERS}"
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    sizes = sizes or TILES[x_TD.element_size()]
    tail = signals.tail
    ranks = len(rooms)
    t, d = x_TD.shape
    shares = [len(weight) // ranks for weight in weights]
    outputs = [x_TD.new_empty(exchange.rows, share) for share in shares]
    columns = [triton.cdiv(share, sizes.columns) for share in shares]
    ends = [sum(columns[: layer + 1]) for layer in range(len(columns))]
    tile_rows = tiles_of(exchange.shards, sizes.rows)
    flags_used = max(tile_rows) * ends[-1]
    assert flags_used <= exchange.flags, f"{flags_used} tiles of a rank, flags of {exchange.flags}"
    described = sizes.described and can_describe(t, d, *map(len, weights))
    matrices = layer_weights(weights, sizes, described)
    rows = x_TD.contiguous()
    tables = exchange_tables(rooms, exchange, COUNTERS)
    kept = outputs[0] if made is None else made
    operand = row_boxes(rows, sizes) if described else rows
    tensors = (operand, *matrices.operands, *filled(outputs), kept, *tables, *time_tables(signals))
    clocked = x_TD.is_cuda
    own = tile_rows[exchange.me]
    places = (own, sum(tile_rows) - own, exchange.flags, exchange.me, patience_limit(tail.patience, clocked))
    numbers = (d, *filled(shares), *matrices.strides, sum(shares), *filled(ends), *places)
    flags = (ranks, lanes_of(ranks), clocked, signals.records is not None, described, matrices.turned)
    constants = (*flags, d % sizes.depth == 0, sizes.rows, sizes.columns, sizes.depth, sizes.band)
    return ToHeadsLaunch(tensors, numbers, constants, signals.programs, sizes.options, tuple(outputs))


def launch_to_heads(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> tuple[Tensor, ...]:
    """(C, H) of each layer. The end of the exchange is signalled and waited for by the kernel."""
    launch = bind_to_heads(x_TD, weights, rooms, exchange, sizes)
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    signals.tail.is_given = True
    if signals.apart:
        launch.run(keeps=False)
        exchange.end()
        launch.run(sends=False)
    else:
        launch.run()
        exchange.end()
    return launch.outputs
