"""The second product of experts while its results return, in Triton. Imported only where Triton is.

    y = a W_down     sums of y by arrived token -> room of the token's rank     there: sums over ranks

Results are summed before they travel: a token has one row for each rank, not one for each expert, and all its rows
here are in one place. So a tile does not write to other ranks by itself. The first programs multiply tiles, those for
the tokens of the next rank first and of this one last, and count the rows that are done; the last few programs take
pieces in the same order, wait until all rows of their tokens are done, sum them, and write to the room of their rank.
A tile with rows of several ranks comes with the first that waits for it, so that all pieces of a rank can leave once
its tiles are done.
Meanwhile the others multiply for the next one, and take pieces too when no tile is left. What waits comes last, so that
it cannot keep a tile from running.

Each sum is over the same rows in the same order in every run. The sums over ranks are a launch of their own behind the
exchange, and read this rank's memory alone.

R rows of experts, N rows of arrived tokens, K choices of a token, D width, F inner width, P pieces, s ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.experts.arriving_tiles_triton import (
    BAND,
    load_tile,
    locate_tile,
    order_tiles,
    take_number,
)
from moefold.kernels.experts.few_rows_triton import multiply_down
from moefold.kernels.routing.arrival_pieces import TileExchange
from moefold.kernels.routing.peer_rows_triton import address_table, launch_sum_peer_rows, load_room, load_slots
from moefold.kernels.routing.peer_signals_triton import (
    as_words,
    is_over_for_any,
    lanes_of,
    load_words,
    note_lost_rank,
    patience_limit,
    read_clock,
)
from moefold.kernels.routing.piece_signals_triton import end_receiving, end_sending, note_time
from moefold.kernels.routing.rows_triton import TILE, columns_of_program
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)
from moefold.layout.peer_rooms import PeerRooms, as_peer_rooms

COLUMNS = 256  # of a tile
DEPTH = 64
COUNTED_ROWS = 32  # rows whose tiles are counted together
AWAITED_TOKENS = 16  # whose rows are waited for at a time
SUMMED_TOKENS = 8
SUMMED_COLUMNS = 1024
OPTIONS = {"num_warps": 8, "num_stages": 4}
BY_LAST = False  # the order of tiles: the first rank that waits for a tile has it early
COUNTERS = constexpr(4)  # pieces that are sent, programs that have finished, tiles and pieces that are taken


@triton.jit
def count_done_rows(done, row, real, ROWS: constexpr, COUNTED: constexpr):
    """Count the rows of a tile of one column of tiles."""
    tl.debug_barrier()  # all threads of the program have written
    LINES: constexpr = 2 * ROWS // COUNTED
    line = row // COUNTED + tl.arange(0, LINES)
    begin = tl.maximum(line * COUNTED, row)
    end = tl.minimum(line * COUNTED + COUNTED, row + real)
    tl.atomic_add(done + line, end - begin, mask=end > begin, sem="release", scope="gpu")


@triton.jit
def late_rows(done, slot, last_end, tile_columns, COUNTED: constexpr):
    """How many of these rows, of which -1 is none, lie where not all tiles are done."""
    line = slot // COUNTED
    rows = tl.minimum(last_end - line * COUNTED, COUNTED)
    inside = slot >= 0
    seen = tl.atomic_add(done + line, tl.zeros_like(slot), mask=inside, sem="acquire", scope="gpu")
    is_late = inside & (seen < rows * tile_columns)
    return tl.sum(tl.sum(is_late.to(tl.int32), 1), 0)


@triton.jit
def await_rows(done, slot, last_end, tile_columns, limit, COUNTED: constexpr, CLOCKED: constexpr):
    """Wait until all these rows are done; how many are not within the limit."""
    late = late_rows(done, slot, last_end, tile_columns, COUNTED)
    looks = tl.zeros([], tl.int64)
    begin = read_clock(looks, CLOCKED)
    is_over = (limit <= 0).to(tl.int32)
    while (late > 0) & (is_over == 0):
        late = late_rows(done, slot, last_end, tile_columns, COUNTED)
        looks += 1
        is_over = is_over_for_any(read_clock(looks, CLOCKED) - begin, limit)
    return late


@triton.jit
def note_late_tiles(late, me, number, is_lost, own_words, fault_2, RANKS: constexpr):
    """Name this rank if tiles of its own are late; whether a rank is lost."""
    one_late = tl.zeros([1], tl.int32) + late
    this_rank = tl.zeros([1], tl.int32) + me
    note_lost_rank(one_late, this_rank, number, is_lost, own_words, fault_2, RANKS, RANKS)
    return tl.where(late > 0, is_lost + 1, is_lost)


@triton.jit
def await_piece(
    slots_NK,
    begin,
    end,
    done,
    last_end,
    tile_columns,
    limit,
    K: constexpr,
    CHOICES: constexpr,
    ROWS: constexpr,
    COUNTED: constexpr,
    CLOCKED: constexpr,
):
    """Wait until all rows of the tokens of a piece are done; not 0 if some are not within the limit. Tiles wait for
    nobody, and so this ends, unless a fault keeps one from running: then the first late rows use up the limit."""
    k = tl.arange(0, CHOICES)
    late = tl.zeros([], tl.int32)
    for token in range(begin, end, ROWS):
        n = numbers_from(token, ROWS).to(tl.int64)
        is_choice = tile_mask(n < end, k < K)
        slot = tl.load(tile_pointers(slots_NK, n, k, K), mask=is_choice, other=-1)
        within = tl.where(late > 0, 0, limit)
        late += await_rows(done, slot, last_end, tile_columns, within, COUNTED, CLOCKED)
    tl.debug_barrier()  # all threads of the program are behind those that have looked
    return late


@triton.jit
def return_piece(
    y_RD,
    slots_NK,
    begin,
    end,
    room,
    shift,
    D,
    K: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """The sums over the rows of each token of a piece, in the room of its rank."""
    for token in range(begin, end, ROWS):
        n = numbers_from(token, ROWS).to(tl.int64)
        is_token = n < end
        slots = ()
        for choice in tl.static_range(K):
            slots += (load_slots(slots_NK, n, choice, is_token, K),)
        for column in range(0, D, COLS):
            c = numbers_from(column, COLS)
            total = fp32_zeros(ROWS, COLS)
            for choice in tl.static_range(K):
                slot = slots[choice]
                inside = tile_mask(slot >= 0, c < D)
                total += load_as_fp32(tile_pointers(y_RD, slot, c, D), inside)
            at = tile_pointers(room, n + shift, c, D)
            store_inside(at, total.to(y_RD.dtype.element_ty), tile_mask(is_token, c < D))
    tl.debug_barrier()  # all threads of the program have written


@triton.jit
def return_sums(
    y_RD,
    slots_NK,
    ends_P,
    shift_s,
    addresses,
    peers,
    done,
    counters,
    piece_times,
    ticks,
    first_entry,
    me,
    number,
    is_lost,
    own_words,
    fault_2,
    patience,
    last_end,
    tile_columns,
    D,
    blocks,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    AWAITED: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
    COUNTED: constexpr,
):
    """Sums of pieces that no other program has taken: those of the next rank, then of the one behind it, and so on. Who
    is done with the last piece gives the signals of the exchange. Returns whether a rank is lost: a program that gave
    up once waits no more."""
    unit = take_number(counters + 3)
    while unit < RANKS * blocks:
        to = (me + 1 + unit // blocks) % RANKS
        piece = to * blocks + unit % blocks
        begin = tl.load(ends_P + piece - 1, mask=piece > 0, other=0)
        end = tl.load(ends_P + piece)
        shift = tl.load(shift_s + to)
        room = load_room(addresses, to, y_RD) + first_entry
        note_time(piece_times, unit, 0, ticks, RECORDS, CLOCKED)
        limit = tl.where(is_lost == 0, patience, 0)
        late = await_piece(
            slots_NK, begin, end, done, last_end, tile_columns, limit, K, CHOICES, AWAITED, COUNTED, CLOCKED
        )
        is_lost = note_late_tiles(late, me, number, is_lost, own_words, fault_2, RANKS)
        note_time(piece_times, unit, 1, ticks, RECORDS, CLOCKED)
        return_piece(y_RD, slots_NK, begin, end, room, shift, D, K, ROWS, COLS)
        note_time(piece_times, unit, 2, ticks, RECORDS, CLOCKED)
        end_sending(peers, number, counters, me, RANKS * blocks, RANKS, WIDTH)
        unit = take_number(counters + 3)
    return is_lost


@triton.jit(do_not_specialize=["me"])
def returning_rows_kernel(
    a_RF,
    down,
    ends_E,
    tiles_M4,
    count,
    y_RD,
    slots_NK,
    ends_P,
    shift_s,
    addresses,
    words,
    fault_2,
    counters,
    tile_times,
    piece_times,
    ticks,
    first_entry,
    E,
    F,
    D,
    blocks,
    me,
    patience,
    MULTIPLIES: constexpr,
    SENDS: constexpr,
    SENDERS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    CLOCKED: constexpr,
    RECORDS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
    BAND: constexpr,
    AWAITED: constexpr,
    SUMMED_ROWS: constexpr,
    SUMMED_COLUMNS: constexpr,
    COUNTED: constexpr,
):
    """MULTIPLIES, SENDS: the parts of the exchange that this launch has; both, but where ranks are played in turns."""
    peers, own_address, number, is_lost = load_words(words, me, RANKS, WIDTH)
    done = counters + COUNTERS  # of each line of rows, behind the others
    tile_rows = tl.load(count)
    tile_columns = tl.cdiv(D, COLUMNS)
    first_sender = tl.num_programs(0) - (SENDERS if SENDS else 0)
    if MULTIPLIES:
        tile = tile_rows * tile_columns
        if tl.program_id(0) < first_sender:
            tile = take_number(counters + 2)
        while tile < tile_rows * tile_columns:
            m, column = locate_tile(tile, tile_rows, tile_columns, BAND)
            expert, row, real = load_tile(tiles_M4, m)
            r = tl.arange(0, ROWS)
            is_row = r < real
            r = r + row.to(tl.int64)
            c = numbers_from(column * COLUMNS, COLUMNS)
            note_time(tile_times, tile, 0, ticks, RECORDS, CLOCKED)
            note_time(tile_times, tile, 1, ticks, RECORDS, CLOCKED)
            y = multiply_down(a_RF, r, is_row, down, expert, c, D, F, ROWS, COLUMNS, DEPTH)
            inside = tile_mask(is_row, c < D)
            store_inside(tile_pointers(y_RD, r, c, D), y.to(y_RD.dtype.element_ty), inside)
            count_done_rows(done, row, real, ROWS, COUNTED)
            note_time(tile_times, tile, 2, ticks, RECORDS, CLOCKED)
            tile = take_number(counters + 2)
    if SENDS:
        last_end = tl.load(ends_E + E - 1)
        is_lost = return_sums(
            y_RD,
            slots_NK,
            ends_P,
            shift_s,
            addresses,
            peers,
            done,
            counters,
            piece_times,
            ticks,
            first_entry,
            me,
            number,
            is_lost,
            as_words(own_address),
            fault_2,
            patience,
            last_end,
            tile_columns,
            D,
            blocks,
            RANKS,
            WIDTH,
            CLOCKED,
            RECORDS,
            K,
            CHOICES,
            AWAITED,
            SUMMED_ROWS,
            SUMMED_COLUMNS,
            COUNTED,
        )
        end_receiving(own_address, number, is_lost, fault_2, counters + 1, patience, RANKS, WIDTH, CLOCKED)


def launch_returning_rows(
    a_RF: Tensor,
    down_EDF: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> Tensor:
    """The results of this rank's tokens, summed over ranks. The end of the exchange is signalled and waited for by the
    kernel."""
    signals = exchange.signals
    assert signals is not None, "sums wait for signals"
    tail = signals.tail
    experts, d, f = down_EDF.shape
    k = slots_NK.shape[1]
    ranks = len(rooms)
    ends_P, shift_s, back_Ts = exchange.pieces
    y_RD = a_RF.new_empty(len(a_RF), d)
    tiles = order_tiles(index_R, ends_E, ends_P, (exchange.me + 1) % ranks, ranks, BY_LAST)
    counted = triton.cdiv(len(a_RF) + TILE, COUNTED_ROWS)
    counters = ends_P.new_zeros(COUNTERS.value + counted)
    clocked = a_RF.is_cuda
    records = signals.records
    times = (tail.addresses,) * 3 if records is None else tuple(records)
    addresses = address_table(rooms)
    first_entry = exchange.turn * rooms[0].stride(0)
    limit = patience_limit(tail.patience, clocked)
    multiplied = (a_RF, down_EDF, ends_E, *tiles, y_RD)
    summed = (slots_NK.contiguous(), ends_P, shift_s, addresses, tail.addresses, tail.fault_2, counters)
    numbers = (first_entry, experts, f, d, len(ends_P) // ranks, exchange.me, limit)
    widths = (ranks, lanes_of(ranks), k, lanes_of(k))
    tile_sizes = (TILE, COLUMNS, DEPTH, BAND)
    sum_sizes = (AWAITED_TOKENS, SUMMED_TOKENS, columns_of_program(d, SUMMED_COLUMNS), COUNTED_ROWS)
    constants = (signals.senders, *widths, clocked, records is not None, *tile_sizes, *sum_sizes)

    def launch(programs: int, multiplies: bool, sends: bool) -> None:
        kernel = returning_rows_kernel[(programs,)]
        kernel(*multiplied, *summed, *times, *numbers, multiplies, sends, *constants, **OPTIONS)

    tail.is_given = True
    if signals.apart:
        launch(signals.programs, True, False)
        launch(signals.senders, False, True)
    else:
        launch(signals.programs, True, True)
    exchange.end()
    own_rooms = as_peer_rooms(rooms).keep(own_for_all, exchange.me, exchange.turn)
    return launch_sum_peer_rows(own_rooms, back_Ts)


def own_for_all(rooms: PeerRooms, me: int, turn: int) -> PeerRooms:
    """The room of this rank in place of every rank's: it has all results."""
    own = rooms[me][turn]
    return PeerRooms([own] * len(rooms))
