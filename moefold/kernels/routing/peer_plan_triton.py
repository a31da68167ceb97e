"""Choices of all ranks, announced and arranged, in Triton. Imported only where Triton is.

A program has one block of a sender's tokens. Nothing is atomic but the count of programs that have ended, and nothing
depends on the order of programs. What a lost rank left in a room is no place: all that is written is bounded.

s ranks that send, n ranks of ep, T tokens that a rank may send, K choices, B blocks of a sender, C counts of a block,
E experts, e experts held here, N rows of arrived tokens, R rows of experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.anatomy.announced_choices import BLOCK_TOKENS, columns_of_counts
from moefold.kernels.routing.arrivals import ArrangedArrivals, ArrivalShape
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.peer_rows_triton import address_table, load_room
from moefold.kernels.routing.peer_signals_triton import end_exchange, tail_arguments
from moefold.kernels.tile_triton import (
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_offsets,
    wide_program_id,
)

COUNTS = 8192  # of experts, that are loaded at a time
FILLED = 1024  # entries that are filled at a time


@triton.jit
def load_place(ids_TK, position_E, at, inside, E):
    """The place of the expert of each choice, -1 for none."""
    id = tl.load(ids_TK + at, mask=inside, other=-1)
    is_choice = (id >= 0) & (id < E)
    place = tl.load(position_E + id, mask=is_choice, other=-1)
    return place.to(tl.int32)


@triton.jit
def is_at(place, numbers):
    """1 where a token's place is the number."""
    same = place[:, None] == numbers[None, :]
    return same.to(tl.int32)


@triton.jit
def announce_choices_kernel(
    ids_TK, weights_TK, position_E, positions, weights, counts, sender, kept_room, T, MOST, E, n, held,
    words, fault_2, finished, me, patience,
    SIGNALS: constexpr, RANKS: constexpr, WIDTH: constexpr, CLOCKED: constexpr,
    SENDERS: constexpr, K: constexpr, CHOICES: constexpr, PLACES: constexpr, GROUPS: constexpr, TOKENS: constexpr,
):  # fmt: skip
    """One block of a rank's choices to all rooms, and their counts."""
    block = wide_program_id(0)
    t = numbers_from(block * TOKENS, TOKENS)
    k = tl.arange(0, CHOICES)
    is_sent = tile_mask(t < T, k < K)
    at = tile_offsets(t, k, K)
    place = load_place(ids_TK, position_E, at, is_sent, E)
    weight = load_or_zero(weights_TK + at, is_sent)
    # counts: choices of each expert, tokens for each rank
    expert = tl.arange(0, PLACES)
    every_place = tl.reshape(place, [TOKENS * CHOICES])
    chosen = tl.histogram(every_place, PLACES, mask=every_place >= 0)
    group = tl.arange(0, GROUPS)
    rank = tl.where(place >= 0, place // held, -1)
    goes_there = rank[:, :, None] == group[None, None, :]
    goes = tl.max(goes_there.to(tl.int32), 1)
    tokens = tl.sum(goes, 0)
    # the same to every rank
    inside = tile_mask(t < MOST, k < K)
    wide_sender = tl.zeros([], tl.int64) + sender
    first = wide_sender * MOST * K
    columns = E + n + 1
    line = (wide_sender * tl.num_programs(0) + block) * columns
    for to in tl.static_range(SENDERS):
        room = load_words32(positions, to)
        store_inside(room + first + at, place, inside)
        weight_room = load_room(weights, to, weights_TK)
        store_inside(weight_room + first + at, weight, inside)
        count_room = load_words32(counts, to) + line
        store_inside(count_room + expert, chosen, expert < E)
        store_inside(count_room + E + group, tokens, group < n)
        tl.store(count_room + E + n, kept_room)
    end_exchange(words, fault_2, finished, me, patience, SIGNALS, RANKS, WIDTH, CLOCKED)


@triton.jit
def load_words32(addresses, rank):
    """The room of a rank, as integers of 32 bits."""
    address = tl.load(addresses + rank)
    room = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(room, 16)


@triton.jit
def sum_counts(counts_PC, first, column, inside, block, programs, columns, STEP: constexpr):
    """Sums of some columns over STEP blocks: over all of them, and over those before a block."""
    b = numbers_from(first, STEP)
    at = counts_PC + tile_offsets(b, column, columns)
    count = load_or_zero(at, tile_mask(b < programs, inside))
    is_before = (b < block)[:, None]
    earlier = tl.where(is_before, count, 0)
    return tl.sum(count, 0), tl.sum(earlier, 0)


@triton.jit
def value_at(values, numbers, number):
    return tl.sum(tl.where(numbers == number, values, 0), 0)


@triton.jit
def store_rows_of_tokens(slots_Ts, slots, token, group, T, n, ETP: constexpr):
    """Rows of this rank's tokens, the same on all etp ranks that hold the same experts."""
    inside = tile_mask(token < T, group < n)
    senders = n * ETP
    for part in tl.static_range(ETP):
        at = slots_Ts + tile_offsets(token, group * ETP + part, senders)
        store_inside(at, slots, inside)


@triton.jit
def fill_behind(out, value, first, end, limit, STEP: constexpr):
    """Store a value from `first` to `end`, where entries are at `limit` or behind."""
    for begin in range(first, end, STEP):
        i = numbers_from(begin, STEP)
        store_inside(out + i, value, (i < end) & (i >= limit))


@triton.jit
def fill_padding(
    index_R, weight_R, first, end, begins, counts, STEP: constexpr
):  # fmt: skip
    """No source and no weight for rows that are behind those of their expert."""
    for begin in range(first, end, STEP):
        r = numbers_from(begin, STEP)
        behind = r[:, None] - begins[None, :]
        is_real = (behind >= 0) & (behind < counts[None, :])
        is_padding = tl.sum(is_real.to(tl.int32), 1) == 0
        store_inside(index_R + r, -1, (r < end) & is_padding)
        store_inside(weight_R + r, 0.0, (r < end) & is_padding)


@triton.jit
def arrange_arrivals_kernel(
    positions_AK, weights_AK, counts_PC, index_R, slots_NK, weight_R, ends_e, slots_Ts, room_s, overflowed, lost,
    sender, rank, T, MOST, blocks, programs, N, R, E, n, held,
    WATCHES: constexpr, ETP: constexpr, MULTIPLE: constexpr, EACH: constexpr,
    K: constexpr, HELD: constexpr, GROUPS: constexpr, TOKENS: constexpr, STEP: constexpr, FILLED: constexpr,
):  # fmt: skip
    """Rows of one block's tokens, and its part of what is filled behind the last row."""
    block = tl.program_id(0)
    columns = E + n + 1
    counted = programs
    if WATCHES:  # without a rank, nothing arrives
        is_lost = tl.load(lost) != 0
        counted = tl.where(is_lost, 0, programs)
    expert = tl.arange(0, HELD)
    is_held = expert < held
    group = tl.arange(0, GROUPS)
    is_group = group < n
    # choices of each expert here, and tokens for each rank: of all blocks, and of those before
    rows = tl.zeros([HELD], tl.int32)
    rows_before = rows
    tokens = tl.zeros([GROUPS], tl.int32)
    tokens_before = tokens
    for first in range(0, counted, STEP):
        column = rank * held + expert
        total, earlier = sum_counts(counts_PC, first, column, is_held, block, programs, columns, STEP)
        rows += total
        rows_before += earlier
        total, earlier = sum_counts(counts_PC, first, E + group, is_group, block, programs, columns, STEP)
        tokens += total
        tokens_before += earlier
    # where each expert's rows begin
    sizes = (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    if EACH > 0:
        sizes = tl.where(is_held, EACH, 0)
    ends = tl.cumsum(sizes, 0)
    begins = ends - sizes
    last_end = tl.sum(sizes, 0)
    arrived = value_at(tokens, group, rank)
    if block == 0:
        store_inside(ends_e + expert, tl.minimum(ends, R), is_held)
        senders = n * ETP
        for part in tl.static_range(ETP):
            of = group * ETP + part
            at = counts_PC + of * blocks * columns + columns - 1
            room = tl.load(at, mask=(of < senders) & (counted > 0), other=-1)
            store_inside(room_s + of, room, of < senders)
        if (arrived > N) | (last_end > R):
            tl.store(overflowed, 1)
    # the row of each token on each rank
    of_sender = block // blocks
    token = numbers_from((block - of_sender * blocks) * TOKENS, TOKENS)
    is_token = (token < MOST) & (counted > 0)
    source = (of_sender * MOST + token).to(tl.int64) * K
    goes = tl.zeros([TOKENS, GROUPS], tl.int32)
    chosen = tl.zeros([TOKENS, HELD], tl.int32)
    for number in tl.static_range(K):
        place = tl.load(positions_AK + source + number, mask=is_token, other=-1)
        to = tl.where(place >= 0, place // held, -1)
        goes = goes | is_at(to, group)
        chosen += is_at(place - rank * held, tl.where(is_held, expert, -E - 1))
    number_on_rank = tl.cumsum(goes, 0) - goes + tokens_before[None, :]
    fits = (goes > 0) & (number_on_rank < N) & (number_on_rank >= 0)
    slots = tl.where(fits, number_on_rank, -1)
    if of_sender == sender:
        store_rows_of_tokens(slots_Ts, slots, token, group, T, n, ETP)
    arrival = tl.sum(tl.where((group == rank)[None, :], slots, 0), 1)
    # the row of each choice: behind those of its expert in earlier blocks, tokens and choices
    next_row = tl.cumsum(chosen, 0) - chosen + (begins + rows_before)[None, :]
    has_arrived = is_token & (arrival >= 0)
    for number in tl.static_range(K):
        place = tl.load(positions_AK + source + number, mask=is_token, other=-1)
        same = is_at(place - rank * held, tl.where(is_held, expert, -E - 1))
        row = tl.sum(same * next_row, 1)
        next_row += same
        is_here = (tl.sum(same, 1) > 0) & (row >= 0) & (row < R)
        weight = load_or_zero(weights_AK + source + number, is_here & has_arrived)
        store_inside(index_R + row, tl.where(has_arrived, arrival, -1), is_here)
        store_inside(weight_R + row, weight, is_here)
        link = arrival.to(tl.int64) * K + number
        store_inside(slots_NK + link, tl.where(is_here, row, -1), has_arrived)
    # this program's part of what nobody writes
    share = tl.cdiv(R, programs)
    first_row = block * share
    end_row = tl.minimum(first_row + share, R)
    if (MULTIPLE > 1) | (EACH > 0):
        fill_padding(index_R, weight_R, first_row, end_row, begins, rows, STEP)
    else:
        fill_behind(index_R, -1, first_row, end_row, last_end, FILLED)
        fill_behind(weight_R, 0.0, first_row, end_row, last_end, FILLED)
    links = tl.cdiv(N * K, programs)
    first_link = block * links
    end_link = tl.minimum(first_link + links, N * K)
    fill_behind(slots_NK, -1, first_link, end_link, arrived * K, FILLED)


PlanRoomLists = tuple[list[Tensor], list[Tensor], list[Tensor]]


def launch_announce_choices(
    ids_TK: Tensor,
    weights_TK: Tensor,
    position_E: Tensor,
    numbers: tuple[int, int],
    rooms: PlanRoomLists,
    tail: ExchangeTail | None,
) -> None:
    """`numbers`: this sender, and the room that it keeps."""
    positions, weights, counts = rooms
    senders, most, k = positions[0].shape
    blocks, columns = counts[0].shape[1:]
    tokens = len(ids_TK)
    experts = len(position_E)
    ranks = columns - experts - 1
    held = experts // ranks
    device = ids_TK.device
    tables = (address_table(positions, device), address_table(weights, device), address_table(counts, device))
    inputs = (ids_TK.contiguous(), weights_TK.contiguous(), position_E)
    sizes = (tokens, most, experts, ranks, held)
    widths = [width_of(size) for size in (k, experts, ranks)]
    launch = announce_choices_kernel[(blocks,)]
    launch(
        *inputs, *tables, *numbers, *sizes, *tail_arguments(tail, tables[0]), senders, k, *widths, BLOCK_TOKENS,
        num_warps=8,
    )  # fmt: skip


def launch_arrange_arrivals(
    rooms: tuple[Tensor, Tensor, Tensor], shape: ArrivalShape, overflowed: Tensor, lost: Tensor | None
) -> ArrangedArrivals:
    positions_sTK, weights_sTK, counts_sBC = rooms
    senders, most, k = positions_sTK.shape
    _, blocks, columns = counts_sBC.shape
    ranks = senders // shape.etp
    experts = ranks * shape.held
    integers = positions_sTK.new_empty(0)
    arranged = ArrangedArrivals(
        integers.new_empty(shape.rows),
        integers.new_empty(shape.arriving, k),
        weights_sTK.new_empty(shape.rows),
        integers.new_empty(shape.held),
        integers.new_empty(shape.tokens, senders),
        integers.new_empty(senders),
    )
    assert columns == columns_of_counts(experts, ranks), f"counts have {columns} columns"
    programs = senders * blocks
    watches = lost is not None
    flags = (overflowed, lost if watches else overflowed)
    bounds = (shape.arriving, shape.rows)
    sizes = (shape.tokens, most, blocks, programs, *bounds, experts, ranks, shape.held)
    widths = (width_of(shape.held), width_of(ranks))
    step = counted_blocks(programs, shape.held)
    launch = arrange_arrivals_kernel[(programs,)]
    launch(
        *rooms, *arranged, *flags, shape.sender, shape.rank, *sizes,
        watches, shape.etp, shape.multiple, shape.each, k, *widths, BLOCK_TOKENS, step, FILLED,
        num_warps=8,
    )  # fmt: skip
    return arranged


def counted_blocks(blocks: int, held: int) -> int:
    """Blocks whose counts are loaded at a time: all of them, if they are not too many."""
    most = COUNTS // width_of(held)
    return max(16, min(most, width_of(blocks)))


def width_of(size: int) -> int:
    """The power of two that holds so many."""
    return max(2, triton.next_power_of_2(size))
