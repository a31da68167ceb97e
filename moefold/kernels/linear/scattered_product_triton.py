"""Products of dense layers whose rows are summed over ranks while they are made, in Triton. Imported only where Triton
is.

Programs take tiles: of the next rank's rows first, then of those of the rank behind it, and of this rank's own last. A
tile of another rank is written into the room of that rank, and a flag there is set for it. A tile of this rank waits
for the same tile of all others, which have made it by then, adds them where they lie, and writes the result: what a
rank makes of its own rows is not stored, and no pass over partial sums follows.

Tiles for other ranks wait for nobody, and come first: tiles that wait cannot keep them from running. Sums are this
rank's first and then in the order of ranks, so that two runs have the same bits.

T rows of this rank, C of all ranks, K inputs of a layer, N outputs, s ranks.
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
    begin_table,
    can_describe,
    filled,
    layer_weights,
    locate_shard,
    multiply_boxes,
    multiply_rows,
    row_boxes,
    rows_of_tile,
    tiles_of,
)
from moefold.kernels.routing.peer_rows_triton import address_table, load_room
from moefold.kernels.routing.peer_signals_triton import as_words, lanes_of, load_words, patience_limit
from moefold.kernels.routing.piece_signals_triton import end_receiving, end_sending, give_piece, note_time
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

COUNTERS = 4  # tiles that are sent, programs that have finished, tiles that are taken, those of sums alone


@triton.jit
def add_slots(total, room, slot, is_row, n, most, N, me, RANKS: constexpr):
    """What all other ranks have made of a tile, in their order. `slot`: rows of the tile in each sender's part."""
    for rank in range(RANKS):
        row = (rank * most + slot).to(tl.int64)
        inside = tile_mask(is_row & (me != rank), n < N)
        total += load_as_fp32(tile_pointers(room, row, n, N), inside)
    return total


@triton.jit(do_not_specialize=["most", "tile_rows", "sent_tile_rows", "flags_of_sender", "me"])
def scattered_product_kernel(
    x0,
    x1,
    x2,
    w0,
    w1,
    w2,
    y_TN,
    partial_CN,
    begins,
    addresses,
    flags,
    words,
    fault_2,
    counters,
    tile_times,
    piece_times,
    ticks,
    K0,
    K1,
    K2,
    stride0,
    stride1,
    stride2,
    N,
    most,
    tile_rows,
    sent_tile_rows,
    flags_of_sender,
    me,
    patience,
    LAYERS: constexpr,
    MULTIPLIES: constexpr,
    SENDS: constexpr,
    SUMS: constexpr,
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
    """MULTIPLIES: tiles are products; otherwise they are read from `partial_CN`. SENDS, SUMS: tiles of other ranks, and
    those of this one; with neither all products are written to `partial_CN`. A launch has all three, but where ranks
    are played in turns, or parts are timed. DESCRIBED: inputs and weights are descriptors."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    own_words = as_words(own_address)
    own_flags = as_words(tl.load(flags + me))
    own_room = load_room(addresses, me, y_TN)
    lane = tl.arange(0, WIDTH)
    tile_columns = tl.cdiv(N, COLUMNS)
    sent = sent_tile_rows * tile_columns
    last = tile_rows * tile_columns
    first = tl.zeros_like(sent)
    EXCHANGES: constexpr = SENDS or SUMS
    if EXCHANGES and not SUMS:
        last = sent
    if EXCHANGES and not SENDS:
        first = sent
    if SENDS and tl.program_id(0) == 0:
        # a part more than tiles, so that a rank without tiles for others signals too
        end_sending(peers, number, counters, me, sent + 1, RANKS, WIDTH)
    taken = counters + (2 if SENDS or not SUMS else 3)
    tile = first + take_number(taken)
    while tile < last:
        following = first + take_number(taken)
        # the tile: tiles of this rank's rows in a band of their own
        if tile < sent:
            m, column = locate_tile(tile, sent_tile_rows, tile_columns, BAND)
        else:
            m, column = locate_tile(tile - sent, tile_rows - sent_tile_rows, tile_columns, BAND)
            m += sent_tile_rows
        shard, block, begin, rows = locate_shard(begins, m, me + 1, RANKS, ROWS)
        row, is_row = rows_of_tile(block, rows, ROWS)
        n = numbers_from(column * COLUMNS, COLUMNS)
        row_of_all = begin + row
        piece = block * tile_columns + column
        if not EXCHANGES:
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
        elif shard != me:
            note_time(piece_times, tile, 0, ticks, RECORDS, CLOCKED)
        # main loop over the inputs
        total = fp32_zeros(ROWS, COLUMNS)
        if MULTIPLIES and DESCRIBED:
            at_row = begin + block * ROWS
            at_column = column * COLUMNS
            total = multiply_boxes(total, x0, at_row, 0, w0, at_column, 0, K0, TURNED, DEPTH)
            if LAYERS > 1:
                total = multiply_boxes(total, x1, at_row, 0, w1, at_column, 0, K1, TURNED, DEPTH)
            if LAYERS > 2:
                total = multiply_boxes(total, x2, at_row, 0, w2, at_column, 0, K2, TURNED, DEPTH)
        elif MULTIPLIES:
            total = multiply_rows(total, x0, row_of_all, K0, w0, n, K0, N, stride0, TURNED, EVEN, DEPTH)
            if LAYERS > 1:
                total = multiply_rows(total, x1, row_of_all, K1, w1, n, K1, N, stride1, TURNED, EVEN, DEPTH)
            if LAYERS > 2:
                total = multiply_rows(total, x2, row_of_all, K2, w2, n, K2, N, stride2, TURNED, EVEN, DEPTH)
        else:
            at = tile_pointers(partial_CN, row_of_all.to(tl.int64), n, N)
            total += load_as_fp32(at, tile_mask(is_row, n < N))
        rounded = total.to(y_TN.dtype.element_ty)
        # epilogue
        inside = tile_mask(is_row, n < N)
        if not EXCHANGES:
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            store_inside(tile_pointers(partial_CN, row_of_all.to(tl.int64), n, N), rounded, inside)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
        elif shard != me:
            note_time(piece_times, tile, 1, ticks, RECORDS, CLOCKED)
            room = load_room(addresses, shard, y_TN)
            slot = (me * most + row).to(tl.int64)
            store_inside(tile_pointers(room, slot, n, N), rounded, inside)
            give_piece(flags, shard, me * flags_of_sender + piece, number)
            end_sending(peers, number, counters, me, sent + 1, RANKS, WIDTH)
            note_time(piece_times, tile, 2, ticks, RECORDS, CLOCKED)
        else:
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
            is_awaited = (lane < RANKS) & (lane != me)
            is_lost = await_flags(
                own_flags,
                piece,
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
            summed = add_slots(rounded.to(tl.float32), own_room, row, is_row, n, most, N, me, RANKS)
            at = tile_pointers(y_TN, row.to(tl.int64), n, N)
            store_inside(at, summed.to(y_TN.dtype.element_ty), inside)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
        tile = following
    if SUMS:
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


class ScatterLaunch(NamedTuple):
    """The arguments of a launch but for its parts, and the result that it writes."""

    tensors: tuple[Any, ...]
    numbers: tuple[int, ...]
    layers: int
    constants: tuple[int, ...]
    programs: int
    options: dict[str, int]
    y_TN: Tensor

    def run(self, multiplies: bool = True, sends: bool = True, sums: bool = True) -> None:
        parts = (self.layers, multiplies, sends, sums)
        kernel = scattered_product_kernel[(self.programs,)]
        kernel(*self.tensors, *self.numbers, *parts, *self.constants, **self.options)


def bind_scattered_product(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
    partial_CN: Tensor | None = None,
) -> ScatterLaunch:
    """`partial_CN`: memory of products that are not sent or summed as they are made."""
    assert len(weights) <= LAYERS, f"{len(weights)} layers in a launch of {LAYERS}"
    signals = exchange.signals
    assert signals is not None, "sums wait for signals"
    like = inputs[0]
    sizes = sizes or TILES[like.element_size()]
    tail = signals.tail
    ranks = len(rooms)
    outputs = len(weights[0])
    y_TN = like.new_empty(exchange.shards[exchange.me], outputs)
    depths = [weight.shape[1] for weight in weights]
    tile_rows = tiles_of(exchange.shards, sizes.rows)
    flags_used = max(tile_rows) * triton.cdiv(outputs, sizes.columns)
    assert flags_used <= exchange.flags, f"{flags_used} tiles of a rank, flags of {exchange.flags}"
    clocked = like.is_cuda
    records = signals.records
    times = (tail.addresses,) * 3 if records is None else tuple(records)
    table = (begin_table(rooms, exchange.shards), address_table(rooms), signals.flags, tail.addresses, tail.fault_2)
    counters = table[0].new_zeros(COUNTERS)
    described = sizes.described and can_describe(exchange.rows, outputs, *depths)
    matrices = layer_weights(weights, sizes, described)
    rows = [x_CK.contiguous() for x_CK in inputs]
    operands = [row_boxes(x_CK, sizes) for x_CK in rows] if described else rows
    kept = y_TN if partial_CN is None else partial_CN
    tensors = (*filled(operands), *matrices.operands, y_TN, kept, *table, counters, *times)
    limit = patience_limit(tail.patience, clocked)
    all_rows = sum(tile_rows)
    places = (max(exchange.shards), all_rows, all_rows - tile_rows[exchange.me], exchange.flags, exchange.me, limit)
    numbers = (*filled(depths), *matrices.strides, outputs, *places)
    even = all(depth % sizes.depth == 0 for depth in depths)
    flags = (ranks, lanes_of(ranks), clocked, records is not None, described, matrices.turned, even)
    constants = (*flags, sizes.rows, sizes.columns, sizes.depth, sizes.band)
    return ScatterLaunch(tensors, numbers, len(weights), constants, signals.programs, sizes.options, y_TN)


def launch_scattered_product(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
    sizes: TileSizes | None = None,
) -> Tensor:
    """(T, N) of this rank. The end of the exchange is signalled and waited for by the kernel."""
    launch = bind_scattered_product(inputs, weights, rooms, exchange, sizes)
    signals = exchange.signals
    assert signals is not None, "sums wait for signals"
    signals.tail.is_given = True
    if signals.apart:
        launch.run(sums=False)
        exchange.end()
        launch.run(sends=False)
    else:
        launch.run()
        exchange.end()
    return launch.y_TN
