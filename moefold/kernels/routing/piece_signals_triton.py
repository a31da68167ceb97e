"""Signals in pieces between ranks, and clocks of what waits for them, in Triton. Imported only where Triton is.

Behind the words of a rank (peer_signals_triton.py) stand its flags, one for each piece of each sender: the number of
the last exchange whose piece has been written. Each has one writer and only grows, so that none is ever cleared. A
release orders the rows of a piece before its flag, an acquire what reads them behind it.

The exchange as a whole is signalled when its last piece has been, and waited for by the last program of the kernel
that multiplies: so nobody writes to a room that is still read (comm/arena.py), as with exchanges that are no pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import globaltimer

from moefold.kernels.routing.peer_signals_triton import (
    as_words,
    await_signals,
    await_words,
    give_signals,
    note_lost_rank,
)


@triton.jit
def give_piece(flags, to, piece, number):
    """Tell a rank that a piece has been written."""
    tl.debug_barrier()  # all threads of the program have written
    address = tl.load(flags + to)
    tl.atomic_xchg(as_words(address) + piece, number, sem="release", scope="sys")


@triton.jit
def await_pieces(
    own_flags,
    low,
    high,
    number,
    is_lost,
    own_words,
    fault_2,
    blocks,
    patience,
    RANKS: constexpr,
    PIECES: constexpr,
    CLOCKED: constexpr,
):
    """Wait for the pieces from `low` to `high`; whether a rank is lost. A program that gave up once waits no more."""
    piece = tl.arange(0, PIECES)
    inside = (piece >= low) & (piece <= high)
    limit = tl.where(is_lost == 0, patience, 0)
    late = await_words(own_flags, piece, number, inside, limit, CLOCKED)
    sender = piece // blocks
    note_lost_rank(late, sender, number, is_lost, own_words, fault_2, RANKS, RANKS)
    tl.debug_barrier()  # all threads of the program are behind those that have looked
    return tl.where(tl.sum(late) > 0, is_lost + 1, is_lost)


@triton.jit
def read_time(ticks, RECORDS: constexpr, CLOCKED: constexpr):
    """The clock, or without a clock the number of readings before this one; without records zero."""
    now = tl.zeros([], tl.int64)
    if RECORDS:
        if CLOCKED:
            now = globaltimer()
        else:
            now = tl.atomic_add(ticks, 1)
    return now


@triton.jit
def note_time(records, line, column: constexpr, ticks, RECORDS: constexpr, CLOCKED: constexpr):
    """Write the time to a line of records."""
    if RECORDS:
        now = read_time(ticks, RECORDS, CLOCKED)
        tl.store(records + line * 3 + column, now)


@triton.jit
def note_waits(records, line, begun, waited, ticks, RECORDS: constexpr, CLOCKED: constexpr):
    """Write the line of a tile that has waited several times, which ends now: as if it had done so at its begin."""
    if RECORDS:
        tl.store(records + line * 3, begun)
        tl.store(records + line * 3 + 1, begun + waited)
        note_time(records, line, 2, ticks, RECORDS, CLOCKED)


@triton.jit
def end_sending(words, number, sent, me, parts, RANKS: constexpr, WIDTH: constexpr):
    """The end of one of the parts that are sent: who is done with the last gives the signals of the exchange."""
    before = tl.atomic_add(sent, 1, sem="acq_rel", scope="gpu")
    if before == parts - 1:
        give_signals(words, number, me, RANKS, WIDTH)


@triton.jit
def end_receiving(
    own_address,
    number,
    is_lost,
    fault_2,
    finished,
    patience,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
):
    """The end of a program: the last of all waits for the signals of all ranks."""
    tl.debug_barrier()  # all threads of the program have read
    before = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        await_signals(own_address, number, is_lost, fault_2, patience, RANKS, WIDTH, CLOCKED)
