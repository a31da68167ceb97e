"""Choices of all ranks, announced and arranged, in Triton. Imported only where Triton is.

A program has one block of a sender's tokens, or a share of what no token has. Nothing is atomic but the count of
programs that have ended, and nothing depends on their order. What a lost rank left in a room is no place: all that is
written is bounded.

s ranks that send, n ranks of ep, T tokens that a rank may send, K choices, B blocks of a sender, C counts of a block,
E experts, e experts held here, N rows of arrived tokens, R rows of experts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.anatomy.announced_choices import BLOCK_TOKENS, columns_of_counts
from moefold.kernels.kept_launch_triton import BoundArguments, KeptLaunch
from moefold.kernels.routing.arrivals import ArrangedArrivals, ArrivalShape
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.peer_rows_triton import address_table, load_room
from moefold.kernels.routing.peer_signals_triton import (
    begin_exchange,
    end_exchange,
    note_given,
    tail_arguments,
)
from moefold.kernels.tile_triton import (
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_offsets,
    tile_pointers,
    wide_program_id,
)
from moefold.layout.peer_rooms import MOST_FOR_SIZES, PeerRooms, as_peer_rooms

COUNTS = 8192  # of experts, that are loaded at a time
FILLED = 1024  # entries that are filled at a time
WARPS = 8


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


@triton.jit(do_not_specialize=["sender", "kept_room", "T", "me"])
def announce_choices_kernel(
    ids_TK,
    weights_TK,
    position_E,
    positions,
    weights,
    counts,
    words,
    fault_2,
    finished,
    sender,
    kept_room,
    T,
    MOST,
    E,
    n,
    held,
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
    # loads first: none is moved ahead of a store
    is_sent = tile_mask(t < T, k < K)
    at = tile_offsets(t, k, K)
    place = load_place(ids_TK, position_E, at, is_sent, E)
    weight = load_or_zero(weights_TK + at, is_sent)
    place_rooms = ()
    weight_rooms = ()
    count_rooms = ()
    for to in tl.static_range(SENDERS):
        place_rooms += (load_words32(positions, to),)
        weight_rooms += (load_room(weights, to, weights_TK),)
        count_rooms += (load_words32(counts, to),)
    peers, own_address, exchange, is_lost = begin_exchange(words, me, SIGNALS, RANKS, WIDTH)
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
        store_inside(place_rooms[to] + at, place, inside)
        store_inside(weight_rooms[to] + at, weight, inside)
        count_room = count_rooms[to] + first
        store_inside(count_room + expert, chosen, expert < E)
        store_inside(count_room + E + group, tokens, group < n)
        tl.store(count_room + E + n, kept_room)
    end_exchange(peers, own_address, exchange, is_lost, fault_2, finished, me, patience, SIGNALS, RANKS, WIDTH, CLOCKED)


@triton.jit
def load_words32(addresses, rank):
    """The room of a rank, as integers of 32 bits."""
    address = tl.load(addresses + rank)
    room = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(room, 16)


@triton.jit
def sum_counts(counts_PC, column, inside, own, block, programs, columns, WIDTH: constexpr, STEP: constexpr):
    """Sums of some columns of counts and of an own one: over all blocks, and over those before a block."""
    every = tl.zeros([STEP, WIDTH], tl.int32)
    earlier = tl.zeros([STEP, WIDTH], tl.int32)
    own_every = tl.zeros([STEP], tl.int32)
    own_earlier = tl.zeros([STEP], tl.int32)
    for first in range(0, programs, STEP):
        b = numbers_from(first, STEP)
        is_block = b < programs
        count = load_or_zero(tile_pointers(counts_PC, b, column, columns), tile_mask(is_block, inside))
        own_count = load_or_zero(counts_PC + b * columns + own, is_block)
        is_before = b < block
        every += count
        earlier += tl.where(is_before[:, None], count, 0)
        own_every += own_count
        own_earlier += tl.where(is_before, own_count, 0)
    return tl.sum(every, 0), tl.sum(earlier, 0), tl.sum(own_every, 0), tl.sum(own_earlier, 0)


@triton.jit
def column_at(values, numbers, number):
    """One column of a tile whose columns have these numbers."""
    found = tl.where(numbers[None, :] == number, values, 0)
    return tl.sum(found, 1)


@triton.jit
def rows_before(chosen):
    """Sums over the tokens before each."""
    return tl.cumsum(chosen, 0) - chosen


@triton.jit
def store_kept_rooms(counts_PC, room_s, group, blocks, columns, n, is_whole, ETP: constexpr):
    """The room that each rank keeps, which stands in the last column of its first block."""
    senders = n * ETP
    for part in tl.static_range(ETP):
        rank = group * ETP + part
        inside = rank < senders
        first = rank * blocks * columns
        room = tl.load(counts_PC + first + columns - 1, mask=inside, other=-1)
        store_inside(room_s + rank, tl.where(is_whole, room, -1), inside)


@triton.jit
def fill_behind(out, value, first, end, limit, STEP: constexpr):
    """Store a value in some entries, where they are at `limit` or behind."""
    for begin in range(first, end, STEP):
        i = numbers_from(begin, STEP)
        is_behind = (i < end) & (i >= limit)
        store_inside(out + i, value, is_behind)


@triton.jit
def fill_padding(index_R, weight_R, first, end, begins, counts, STEP: constexpr):
    """No source and no weight for some rows, where they are behind those of their expert."""
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
def count_choices(slot, k, expert, TOKENS: constexpr, CHOICES: constexpr, HELD: constexpr, K: constexpr):
    """How many choices of a token are each expert, and for each choice how many before it of its token are the same."""
    chosen = tl.zeros([TOKENS, HELD], tl.int32)
    before = tl.zeros([TOKENS, CHOICES], tl.int32)
    for number in tl.static_range(K):
        of_token = column_at(slot, k, number)
        chosen += is_at(of_token, expert)
        is_later = k[None, :] > number
        again = is_later & (slot == of_token[:, None])
        before += again.to(tl.int32)
    return chosen, before


@triton.jit
def arrange_block(
    positions_AK,
    weights_AK,
    counts_PC,
    index_R,
    slots_NK,
    weight_R,
    block,
    is_whole,
    rank,
    MOST,
    blocks,
    programs,
    N,
    R,
    E,
    n,
    held,
    MULTIPLE: constexpr,
    EACH: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    HELD: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
):
    """Rows of one block's choices, in both directions, and their weights."""
    of_sender = block // blocks
    own_block = block - of_sender * blocks
    token = numbers_from(own_block * TOKENS, TOKENS)
    k = tl.arange(0, CHOICES)
    inside = tile_mask(token < MOST, k < K)
    line = (of_sender * MOST + token).to(tl.int64)
    at = tile_offsets(line, k, K)
    place = tl.load(positions_AK + at, mask=inside, other=-1)
    weight = load_or_zero(weights_AK + at, inside)
    # choices of each expert here, and tokens that arrive: of all blocks, and of those before
    expert = tl.arange(0, HELD)
    is_held = expert < held
    columns = E + n + 1
    first = rank * held
    rows, rows_before_block, _, tokens_before = sum_counts(
        counts_PC, first + expert, is_held, E + rank, block, programs, columns, HELD, STEP
    )
    begins, _ = first_rows(rows, is_held, MULTIPLE, EACH)
    # the row of each token, behind those that arrive from earlier blocks and tokens
    slot = place - first
    is_here = (slot >= 0) & (slot < held) & is_whole
    slot = tl.where(is_here, slot, -1)
    comes = tl.max(is_here.to(tl.int32), 1)
    arrival = tokens_before + rows_before(comes)
    has_arrived = (comes > 0) & (arrival >= 0) & (arrival < N)
    arrival = tl.where(has_arrived, arrival, -1)
    # the row of each choice: behind those of its expert in earlier blocks, tokens and choices
    chosen, before = count_choices(slot, k, expert, TOKENS, CHOICES, HELD, K)
    first_row = begins + rows_before_block
    next_row = rows_before(chosen) + first_row[None, :]
    some_slot = tl.where(is_here, slot, 0)
    row = tl.gather(next_row, some_slot, 1) + before
    is_row = is_here & (row >= 0) & (row < R)
    source = arrival[:, None] + k[None, :] * 0
    store_inside(index_R + row, source, is_row)
    store_inside(weight_R + row, tl.where(source >= 0, weight, 0.0), is_row)
    link = tile_offsets(arrival.to(tl.int64), k, K)
    store_inside(slots_NK + link, tl.where(is_row, row, -1), tile_mask(has_arrived, k < K))


@triton.jit
def place_block(
    positions_AK,
    counts_PC,
    slots_Ts,
    room_s,
    block,
    is_whole,
    sender,
    T,
    MOST,
    blocks,
    programs,
    N,
    E,
    n,
    held,
    ETP: constexpr,
    K: constexpr,
    CHOICES: constexpr,
    GROUPS: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
):
    """The row on each rank of the tokens in one block of this rank, the same on all etp ranks with the same experts."""
    token = numbers_from(block * TOKENS, TOKENS)
    k = tl.arange(0, CHOICES)
    inside = tile_mask(token < MOST, k < K)
    line = (sender * MOST + token).to(tl.int64)
    place = tl.load(positions_AK + tile_offsets(line, k, K), mask=inside, other=-1)
    group = tl.arange(0, GROUPS)
    columns = E + n + 1
    number = sender * blocks + block
    _, tokens_before, _, _ = sum_counts(counts_PC, E + group, group < n, E, number, programs, columns, GROUPS, STEP)
    if block == 0:
        store_kept_rooms(counts_PC, room_s, group, blocks, columns, n, is_whole, ETP)
    rank = tl.where((place >= 0) & is_whole, place // held, -1)
    goes = tl.zeros([TOKENS, GROUPS], tl.int32)
    for number_k in tl.static_range(K):
        of_token = column_at(rank, k, number_k)
        goes = goes | is_at(of_token, group)
    row = tokens_before[None, :] + rows_before(goes)
    fits = (goes > 0) & (row >= 0) & (row < N)
    slots = tl.where(fits, row, -1)
    is_own = tile_mask(token < T, group < n)
    for part in tl.static_range(ETP):
        at = tile_pointers(slots_Ts, token, group * ETP + part, n * ETP)
        store_inside(at, slots, is_own)


@triton.jit
def fill_share(
    counts_PC,
    index_R,
    slots_NK,
    weight_R,
    ends_e,
    overflowed,
    share,
    shares,
    is_whole,
    rank,
    programs,
    N,
    R,
    E,
    n,
    held,
    MULTIPLE: constexpr,
    EACH: constexpr,
    K: constexpr,
    HELD: constexpr,
    STEP: constexpr,
    FILLED: constexpr,
):
    """One share of what no choice has, and with the first where experts' rows end and whether all have room."""
    expert = tl.arange(0, HELD)
    is_held = expert < held
    columns = E + n + 1
    rows, _, tokens, _ = sum_counts(
        counts_PC, rank * held + expert, is_held, E + rank, 0, programs, columns, HELD, STEP
    )
    rows = tl.where(is_whole, rows, 0)
    arrived = tl.where(is_whole, tokens, 0)
    begins, ends = first_rows(rows, is_held, MULTIPLE, EACH)
    last_end = tl.max(ends, 0)
    if share == 0:
        store_inside(ends_e + expert, tl.minimum(ends, R), is_held)
        if (arrived > N) | (last_end > R):
            tl.store(overflowed, 1)
    rows_each = tl.cdiv(R, shares)
    first_row = share * rows_each
    end_row = tl.minimum(first_row + rows_each, R)
    if (MULTIPLE > 1) | (EACH > 0):
        fill_padding(index_R, weight_R, first_row, end_row, begins, rows, STEP)
    else:
        fill_behind(index_R, -1, first_row, end_row, last_end, FILLED)
        fill_behind(weight_R, 0.0, first_row, end_row, last_end, FILLED)
    links_each = tl.cdiv(N * K, shares)
    first_link = share * links_each
    end_link = tl.minimum(first_link + links_each, N * K)
    fill_behind(slots_NK, -1, first_link, end_link, arrived * K, FILLED)


@triton.jit(do_not_specialize=["sender", "rank", "T"])
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
    CHOICES: constexpr,
    HELD: constexpr,
    GROUPS: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
    FILLED: constexpr,
):
    """A program arranges the choices of one block of all ranks, places the tokens of one block of this rank, or fills
    a share of what is left. None reads what another one writes."""
    number = tl.program_id(0)
    is_whole = number >= 0
    if WATCHES:  # without a rank, nothing arrives
        is_whole = tl.load(lost) == 0
    if number < programs:
        arrange_block(
            positions_AK, weights_AK, counts_PC, index_R, slots_NK, weight_R, number, is_whole, rank,
            MOST, blocks, programs, N, R, E, n, held, MULTIPLE, EACH, K, CHOICES, HELD, TOKENS, STEP,
        )  # fmt: skip
    elif number < programs + blocks:
        place_block(
            positions_AK, counts_PC, slots_Ts, room_s, number - programs, is_whole, sender,
            T, MOST, blocks, programs, N, E, n, held, ETP, K, CHOICES, GROUPS, TOKENS, STEP,
        )  # fmt: skip
    else:
        others = programs + blocks
        fill_share(
            counts_PC, index_R, slots_NK, weight_R, ends_e, overflowed,
            number - others, tl.num_programs(0) - others, is_whole, rank, programs,
            N, R, E, n, held, MULTIPLE, EACH, K, HELD, STEP, FILLED,
        )  # fmt: skip


PlanRoomLists = tuple[list[Tensor], list[Tensor], list[Tensor]]


class PlanSizes(NamedTuple):
    """Of the rooms of a plan: ranks that send, tokens that each may send, choices of a token, blocks, and counts."""

    senders: int
    most: int
    k: int
    blocks: int
    columns: int


def plan_sizes(positions_sTK: Tensor, counts_sBC: Tensor) -> PlanSizes:
    return PlanSizes(*positions_sTK.shape, *counts_sBC.shape[1:])


def bind_announce(
    positions: PeerRooms,
    weights: PeerRooms,
    counts: PeerRooms,
    numbers: tuple[int, int],
    tokens: int,
    experts: int,
    tail: ExchangeTail | None,
) -> KeptLaunch:
    senders, most, k, blocks, columns = plan_sizes(positions[0], counts[0])
    tables = [address_table(each) for each in (positions, weights, counts)]
    tail_tensors, tail_numbers = tail_arguments(tail, tables[0])
    ranks = columns - experts - 1
    widths = [width_of(size) for size in (k, experts, ranks)]
    sizes = (tokens, most, experts, ranks, experts // ranks)
    constants = (senders, k, *widths, BLOCK_TOKENS)
    bound = BoundArguments((*tables, *tail_tensors), (*numbers, *sizes, *tail_numbers, *constants))
    return KeptLaunch(announce_choices_kernel, (blocks,), bound, WARPS)


def launch_announce_choices(
    ids_TK: Tensor,
    weights_TK: Tensor,
    position_E: Tensor,
    numbers: tuple[int, int],
    rooms: PlanRoomLists,
    tail: ExchangeTail | None,
) -> None:
    """`numbers`: this sender, and the room that it keeps."""
    positions, weights, counts = map(as_peer_rooms, rooms)
    tokens, experts = ids_TK.shape[0], position_E.shape[0]
    launch = positions.keep_for_sizes(bind_announce, weights, counts, numbers, tokens, experts, tail)
    launch(ids_TK.contiguous(), weights_TK.contiguous(), position_E)
    note_given(tail)


@lru_cache(maxsize=MOST_FOR_SIZES)
def bind_arrange(sizes: PlanSizes, shape: ArrivalShape, watches: bool) -> KeptLaunch:
    senders, most, k, blocks, columns = sizes
    ranks = senders // shape.etp
    experts = ranks * shape.held
    assert columns == columns_of_counts(experts, ranks), f"counts have {columns} columns"
    programs = senders * blocks
    bounds = (shape.arriving, shape.rows)
    counted = (shape.tokens, most, blocks, programs, *bounds, experts, ranks, shape.held)
    widths = (width_of(k), width_of(shape.held), width_of(ranks))
    step = counted_blocks(programs, shape.held)
    shares = -(-programs // 2)  # with four ranks of 4,096 tokens all programs run at a time
    grid = (programs + blocks + shares,)
    constants = (watches, shape.etp, shape.multiple, shape.each, k, *widths, BLOCK_TOKENS, step, FILLED)
    numbers = (shape.sender, shape.rank, *counted, *constants)
    return KeptLaunch(arrange_arrivals_kernel, grid, BoundArguments((), numbers), WARPS)


def launch_arrange_arrivals(
    rooms: tuple[Tensor, Tensor, Tensor],
    shape: ArrivalShape,
    overflowed: Tensor,
    lost: Tensor | None,
) -> ArrangedArrivals:
    positions_sTK, weights_sTK, counts_sBC = rooms
    sizes = plan_sizes(positions_sTK, counts_sBC)
    arranged = ArrangedArrivals(
        counts_sBC.new_empty(shape.rows),
        counts_sBC.new_empty(shape.arriving, sizes.k),
        weights_sTK.new_empty(shape.rows),
        counts_sBC.new_empty(shape.held),
        counts_sBC.new_empty(shape.tokens, sizes.senders),
        counts_sBC.new_empty(sizes.senders),
    )
    watches = lost is not None
    launch = bind_arrange(sizes, shape, watches)
    launch(*rooms, *arranged, overflowed, lost if watches else overflowed)
    return arranged


def counted_blocks(blocks: int, held: int) -> int:
    """Blocks whose counts are loaded at a time: all of them, if they are not too many."""
    most = COUNTS // width_of(held)
    return max(16, min(most, width_of(blocks)))


def width_of(size: int) -> int:
    """The power of two that holds so many."""
    return max(2, triton.next_power_of_2(size))
