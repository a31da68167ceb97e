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
    tile_pointers,
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
def count_tokens(place, group, held):
    """The tokens of a block for each rank."""
    rank = tl.where(place >= 0, place // held, -1)
    is_there = rank[:, :, None] == group[None, None, :]
    goes = tl.max(is_there.to(tl.int32), 1)
    return tl.sum(goes, 0)


@triton.jit
def announce_choices_kernel(
    ids_TK,
    weights_TK,
    position_E,
    positions,
    weights,
    counts,
    sender,
    kept_room,
    T,
    MOST,
    E,
    n,
    held,
    words,
    fault_2,
    finished,
    me,
    patience,
    SIGNALS: constexpr,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
    SENDERS: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    PLACES: constexpr,
    GROUPS: constexpr,
    TOKENS: constexpr,
):
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
    is_place = every_place >= 0
    chosen = tl.histogram(every_place, PLACES, mask=is_place)
    group = tl.arange(0, GROUPS)
    tokens = count_tokens(place, group, held)
    # the same to every rank
    inside = tile_mask(t < MOST, k < K)
    wide_sender = tl.zeros([], tl.int64) + sender
    at += wide_sender * MOST * K
    line = wide_sender * tl.num_programs(0) + block
    columns = E + n + 1
    first = line * columns
    for to in tl.static_range(SENDERS):
        place_room = load_words32(positions, to)
        store_inside(place_room + at, place, inside)
        weight_room = load_room(weights, to, weights_TK)
        store_inside(weight_room + at, weight, inside)
        count_room = load_words32(counts, to) + first
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
def sum_counts(counts_PC, column, inside, block, counted, columns, WIDTH: constexpr, STEP: constexpr):
    """Sums of some columns of counts: over all blocks, and over those before a block."""
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for first in range(0, counted, STEP):
        b = numbers_from(first, STEP)
        at = tile_pointers(counts_PC, b, column, columns)
        held = tile_mask(b < counted, inside)
        count = load_or_zero(at, held)
        is_before = b < block
        earlier = tl.where(is_before[:, None], count, 0)
        total += tl.sum(count, 0)
        before += tl.sum(earlier, 0)
    return total, before


@triton.jit
def value_at(values, numbers, number):
    found = tl.where(numbers == number, values, 0)
    return tl.sum(found, 0)


@triton.jit
def store_rows_of_tokens(slots_Ts, slots, token, group, T, n, ETP: constexpr):
    """Rows of this rank's tokens, the same on all etp ranks that hold the same experts."""
    inside = tile_mask(token < T, group < n)
    senders = n * ETP
    for part in tl.static_range(ETP):
        rank = group * ETP + part
        at = tile_pointers(slots_Ts, token, rank, senders)
        store_inside(at, slots, inside)


@triton.jit
def store_kept_rooms(counts_PC, room_s, group, blocks, columns, n, counted, ETP: constexpr):
    """The room that each rank keeps, which stands in the last column of its first block."""
    senders = n * ETP
    for part in tl.static_range(ETP):
        rank = group * ETP + part
        first = rank * blocks * columns
        at = counts_PC + first + columns - 1
        inside = (rank < senders) & (counted > 0)
        room = tl.load(at, mask=inside, other=-1)
        store_inside(room_s + rank, room, rank < senders)


@triton.jit
def fill_behind(out, value, share, size, limit, STEP: constexpr):
    """Store a value in this program's share of entries, where they are at `limit` or behind."""
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, size)
    for begin in range(first, end, STEP):
        i = numbers_from(begin, STEP)
        is_behind = (i < end) & (i >= limit)
        store_inside(out + i, value, is_behind)


@triton.jit
def fill_padding(index_R, weight_R, share, R, begins, counts, STEP: constexpr):
    """No source and no weight for this program's share of rows, where they are behind those of their expert."""
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, R)
    for begin in range(first, end, STEP):
        r = numbers_from(begin, STEP)
        behind = r[:, None] - begins[None, :]
        is_real = (behind >= 0) & (behind < counts[None, :])
        reals = tl.sum(is_real.to(tl.int32), 1)
        is_padding = (reals == 0) & (r < end)
        store_inside(index_R + r, -1, is_padding)
        store_inside(weight_R + r, 0.0, is_padding)


@triton.jit
def first_rows(rows, is_held, MULTIPLE: constexpr, EACH: constexpr):
    """Where the rows of each expert begin and end, with padding."""
    pads = (rows + MULTIPLE - 1) // MULTIPLE
    sizes = pads * MULTIPLE
    if EACH > 0:
        sizes = tl.where(is_held, EACH, 0)
    ends = tl.cumsum(sizes, 0)
    begins = ends - sizes
    return begins, ends


@triton.jit
def ranks_and_experts(positions_AK, source, is_token, expert, group, first, held, K: constexpr):
    """For each token whether it goes to each rank, and how many of its choices are each expert held here."""
    goes = is_at(source, group) * 0
    chosen = is_at(source, expert) * 0
    for number in tl.static_range(K):
        place = tl.load(positions_AK + source + number, mask=is_token, other=-1)
        rank = tl.where(place >= 0, place // held, -1)
        goes = goes | is_at(rank, group)
        chosen += is_at(place - first, expert)
    return goes, chosen


@triton.jit
def store_choices(
    positions_AK,
    weights_AK,
    index_R,
    slots_NK,
    weight_R,
    source,
    is_token,
    arrival,
    expert,
    next_row,
    first,
    R,
    K: constexpr,
):
    """The row of each choice, in both directions, and its weight. `next_row`: of each token's first choice of each
    expert."""
    has_arrived = is_token & (arrival >= 0)
    link = arrival.to(tl.int64) * K
    for number in tl.static_range(K):
        at = source + number
        place = tl.load(positions_AK + at, mask=is_token, other=-1)
        same = is_at(place - first, expert)
        row = tl.sum(same * next_row, 1)
        next_row += same
        is_held = tl.sum(same, 1) > 0
        is_here = is_held & (row >= 0) & (row < R)
        weight = load_or_zero(weights_AK + at, is_here & has_arrived)
        store_inside(index_R + row, arrival, is_here)
        store_inside(weight_R + row, weight, is_here)
        slot = tl.where(is_here, row, -1)
        store_inside(slots_NK + link + number, slot, has_arrived)


@triton.jit
def arrange_arrivals_kernel(
    positions_AK,
    weights_AK,
    counts_PC,
    index_R,
    slots_NK,
    weight_R,
    ends_e,
    slots_Ts,
    room_s,
    overflowed,
    lost,
    sender,
    rank,
    T,
    MOST,
    blocks,
    programs,
    N,
    R,
    E,
    n,
    held,
    WATCHES: constexpr,
    ETP: constexpr,
    MULTIPLE: constexpr,
    EACH: constexpr,
    K: constexpr,
    HELD: constexpr,
    GROUPS: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
    FILLED: constexpr,
):
    """Rows of one block's tokens, and its share of what is filled behind the last row."""
    block = tl.program_id(0)
    counted = programs
    if WATCHES:  # without a rank, nothing arrives
        is_lost = tl.load(lost) != 0
        counted = tl.where(is_lost, 0, programs)
    # choices of each expert here, and tokens for each rank: of all blocks, and of those before
    number = tl.arange(0, HELD)
    is_held = number < held
    expert = tl.where(is_held, number, -E - 1)  # a number that no choice has
    group = tl.arange(0, GROUPS)
    columns = E + n + 1
    first = rank * held
    rows, rows_before = sum_counts(counts_PC, first + number, is_held, block, counted, columns, HELD, STEP)
    tokens, tokens_before = sum_counts(counts_PC, E + group, group < n, block, counted, columns, GROUPS, STEP)
    begins, ends = first_rows(rows, is_held, MULTIPLE, EACH)
    last_end = tl.max(ends, 0)
    arrived = value_at(tokens, group, rank)
    if block == 0:
        store_inside(ends_e + number, tl.minimum(ends, R), is_held)
        store_kept_rooms(counts_PC, room_s, group, blocks, columns, n, counted, ETP)
        if (arrived > N) | (last_end > R):
            tl.store(overflowed, 1)
    # the row of each token on each rank
    of_sender = block // blocks
    own_block = block - of_sender * blocks
    token = numbers_from(own_block * TOKENS, TOKENS)
    is_token = (token < MOST) & (counted > 0)
    line = of_sender * MOST + token
    source = line.to(tl.int64) * K
    goes, chosen = ranks_and_experts(positions_AK, source, is_token, expert, group, first, held, K)
    place = tl.cumsum(goes, 0) - goes + tokens_before[None, :]
    fits = (goes > 0) & (place >= 0) & (place < N)
    slots = tl.where(fits, place, -1)
    if of_sender == sender:
        store_rows_of_tokens(slots_Ts, slots, token, group, T, n, ETP)
    # the row of each choice: behind those of its expert in earlier blocks, tokens and choices
    is_own = group == rank
    own_slots = tl.where(is_own[None, :], slots, 0)
    arrival = tl.sum(own_slots, 1)
    first_row = begins + rows_before
    next_row = tl.cumsum(chosen, 0) - chosen + first_row[None, :]
    store_choices(
        positions_AK, weights_AK, index_R, slots_NK, weight_R, source, is_token, arrival, expert, next_row, first, R, K
    )
    # what nobody writes
    row_share = tl.cdiv(R, programs)
    if (MULTIPLE > 1) | (EACH > 0):
        fill_padding(index_R, weight_R, row_share, R, begins, rows, STEP)
    else:
        fill_behind(index_R, -1, row_share, R, last_end, FILLED)
        fill_behind(weight_R, 0.0, row_share, R, last_end, FILLED)
    links = N * K
    link_share = tl.cdiv(links, programs)
    fill_behind(slots_NK, -1, link_share, links, arrived * K, FILLED)


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
    positions, _, counts = rooms
    senders, most, k = positions[0].shape
    blocks, columns = counts[0].shape[1:]
    tokens = len(ids_TK)
    experts = len(position_E)
    ranks = columns - experts - 1
    held = experts // ranks
    device = ids_TK.device
    tables = [address_table(each, device) for each in rooms]
    ids_TK = ids_TK.contiguous()
    weights_TK = weights_TK.contiguous()
    inputs = (ids_TK, weights_TK, position_E)
    tail_inputs = tail_arguments(tail, position_E)
    sizes = (tokens, most, experts, ranks, held)
    widths = [width_of(size) for size in (k, experts, ranks)]
    launch = announce_choices_kernel[(blocks,)]
    launch(
        *inputs,
        *tables,
        *numbers,
        *sizes,
        *tail_inputs,
        senders,
        k,
        *widths,
        BLOCK_TOKENS,
        num_warps=8,
    )


def launch_arrange_arrivals(
    rooms: tuple[Tensor, Tensor, Tensor],
    shape: ArrivalShape,
    overflowed: Tensor,
    lost: Tensor | None,
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
        *rooms,
        *arranged,
        *flags,
        shape.sender,
        shape.rank,
        *sizes,
        watches,
        shape.etp,
        shape.multiple,
        shape.each,
        k,
        *widths,
        BLOCK_TOKENS,
        step,
        FILLED,
        num_warps=8,
    )
    return arranged


def counted_blocks(blocks: int, held: int) -> int:
    """Blocks whose counts are loaded at a time: all of them, if they are not too many."""
    most = COUNTS // width_of(held)
    return max(16, min(most, width_of(blocks)))


def width_of(size: int) -> int:
    """The power of two that holds so many."""
    return max(2, triton.next_power_of_2(size))
