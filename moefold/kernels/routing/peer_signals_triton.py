"""Signals between ranks that write to each other's memory, in Triton. Imported only where Triton is.

Words of a rank, in its part of the memory that all ranks share:

    0 .. n - 1   the number of the last exchange for which each rank has signalled
    n            the number of exchanges of this rank
    n + 1        whether a signal did not come: then no exchange waits any more

Numbers are counted on the device, so that a launch is the same in every exchange. A release orders all that this rank
has written before its signal, an acquire all that it reads behind the other's. One program waits, a lane for each rank:
several processes on one card run in turns, and one that waits with many programs would take them all. It is that of a
kernel of its own, or the last program of a kernel that has written to rooms (`end_exchange`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra.cuda import globaltimer

from moefold.kernels.kept_launch_triton import BoundArguments, KeptLaunch
from moefold.kernels.routing.exchange_tail import ExchangeTail

NANOSECONDS = 1e9
MOST_THREADS = constexpr(1024)  # of a program


@triton.jit
def as_words(address):
    """Addresses as pointers to words."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def read_clock(looks, CLOCKED: constexpr):
    """Nanoseconds of the device's clock, or without one the number of looks so far."""
    now = looks
    if CLOCKED:
        now = globaltimer()
    return now


@triton.jit
def late_ranks(own_words, rank, number, inside):
    """1 for each rank that has not signalled."""
    nothing = tl.zeros_like(number)
    seen = tl.atomic_add(own_words + rank, nothing, mask=inside, sem="acquire", scope="sys")
    is_late = inside & (seen < number)
    return is_late.to(tl.int32)


@triton.jit
def is_over_for_any(waited, limit):
    """1 for all threads if it is over for one of them: threads read the clock apart, and one that stops waiting alone
    would leave the others at a barrier of their next look."""
    is_over = (waited >= limit).to(tl.int32)
    return tl.max(tl.zeros([MOST_THREADS], tl.int32) + is_over)


@triton.jit
def await_words(words, place, number, inside, limit, CLOCKED: constexpr):
    """Wait until the words in some places have reached a number; 1 for each that has not within the limit."""
    numbers = tl.zeros_like(place).to(tl.int64) + number
    late = late_ranks(words, place, numbers, inside)
    looks = number * 0
    begin = read_clock(looks, CLOCKED)
    is_over = (limit <= 0).to(tl.int32)
    while (tl.sum(late) > 0) & (is_over == 0):
        late = late_ranks(words, place, numbers, inside)
        looks += 1
        is_over = is_over_for_any(read_clock(looks, CLOCKED) - begin, limit)
    return late


@triton.jit
def note_lost_rank(late, rank, number, is_lost, own_words, fault_2, RANKS: constexpr, WIDTH: constexpr):
    """Name the first rank that is late in memory of the host, unless one was named before."""
    first = tl.min(tl.where(late > 0, rank, WIDTH))
    if (tl.sum(late) > 0) & (is_lost == 0):
        tl.store(fault_2 + 1, number)
        tl.store(fault_2, first.to(tl.int64) + 1)
        tl.store(own_words + RANKS + 1, 1)


@triton.jit
def load_words(addresses, me, RANKS: constexpr, WIDTH: constexpr):
    """Addresses of the words of each rank and of this one, the number of its next exchange, and whether a rank is lost.
    Only kernels of this rank write the two numbers, each at its very end."""
    rank = tl.arange(0, WIDTH)
    words = tl.load(addresses + rank, mask=rank < RANKS, other=0)
    own_address = tl.load(addresses + me)
    own_words = as_words(own_address)
    number = tl.load(own_words + RANKS) + 1
    is_lost = tl.load(own_words + RANKS + 1)
    return words, own_address, number, is_lost


@triton.jit
def exchange_signals(
    words, own_address, number, is_lost, fault_2, me, patience,
    RANKS: constexpr, WIDTH: constexpr, CLOCKED: constexpr,
):  # fmt: skip
    """Signal to all ranks, and wait for the signals of all."""
    give_signals(words, number, me, RANKS, WIDTH)
    await_signals(own_address, number, is_lost, fault_2, patience, RANKS, WIDTH, CLOCKED)


@triton.jit
def give_signals(words, number, me, RANKS: constexpr, WIDTH: constexpr):
    rank = tl.arange(0, WIDTH)
    numbers = tl.zeros([WIDTH], tl.int64) + number
    tl.atomic_xchg(as_words(words) + me, numbers, mask=rank < RANKS, sem="release", scope="sys")


@triton.jit
def await_signals(
    own_address, number, is_lost, fault_2, patience,
    RANKS: constexpr, WIDTH: constexpr, CLOCKED: constexpr,
):  # fmt: skip
    """Wait for the signals of all ranks, and count the exchange."""
    rank = tl.arange(0, WIDTH)
    inside = rank < RANKS
    own_words = as_words(own_address)
    limit = tl.where(is_lost == 0, patience, 0)
    late = await_words(own_words, rank, number, inside, limit, CLOCKED)
    note_lost_rank(late, rank, number, is_lost, own_words, fault_2, RANKS, WIDTH)
    tl.store(own_words + RANKS, number)


@triton.jit(do_not_specialize=["me"])
def exchange_signals_kernel(
    addresses, fault_2, me, patience, RANKS: constexpr, WIDTH: constexpr, CLOCKED: constexpr
):  # fmt: skip
    words, own_address, number, is_lost = load_words(addresses, me, RANKS, WIDTH)
    tl.debug_barrier()  # all lanes have read what one of them writes at the end
    exchange_signals(words, own_address, number, is_lost, fault_2, me, patience, RANKS, WIDTH, CLOCKED)


@triton.jit
def begin_exchange(addresses, me, SIGNALS: constexpr, RANKS: constexpr, WIDTH: constexpr):
    """What the last program needs to signal. All load it, as none knows that it is the last: ahead of their work, so
    that no signal waits for it. `addresses`: of the words of all ranks."""
    words = tl.zeros([WIDTH], tl.int64)
    own_address = tl.zeros([], tl.int64)
    number = own_address
    is_lost = own_address
    if SIGNALS:
        words, own_address, number, is_lost = load_words(addresses, me, RANKS, WIDTH)
    return words, own_address, number, is_lost


@triton.jit
def end_exchange(
    words, own_address, number, is_lost, fault_2, finished, me, patience,
    SIGNALS: constexpr, RANKS: constexpr, WIDTH: constexpr, CLOCKED: constexpr,
):  # fmt: skip
    """The end of a program that has written to rooms: the last of all programs signals and waits."""
    if SIGNALS:
        tl.debug_barrier()  # all threads of the program have written
        before = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu")
        programs = tl.num_programs(0) * tl.num_programs(1)
        if before == programs - 1:
            tl.store(finished, 0)
            exchange_signals(words, own_address, number, is_lost, fault_2, me, patience, RANKS, WIDTH, CLOCKED)


class TailNumbers(NamedTuple):
    """Numbers and constants of `end_exchange`, which a launch is kept by."""

    me: int = 0
    patience: int = 0
    signals: bool = False
    ranks: int = 1
    width: int = 1
    clocked: bool = False


class TailArguments(NamedTuple):
    """Arguments of `end_exchange`: `words`, `fault_2` and `finished`; and the numbers."""

    tensors: tuple[Tensor, Tensor, Tensor]
    numbers: TailNumbers


NO_TAIL = TailNumbers()


def tail_arguments(tail: ExchangeTail | None, unused: Tensor) -> TailArguments:
    """Arguments of a kernel that gives the signals of an exchange, or without a tail does not. `unused`: any tensor."""
    if tail is None:
        return TailArguments((unused, unused, unused), NO_TAIL)
    addresses = tail.addresses
    numbers = tail_numbers(tail.me, tail.patience, addresses.shape[0], addresses.is_cuda)
    return TailArguments((addresses, tail.fault_2, tail.finished), numbers)


def note_given(tail: ExchangeTail | None) -> None:
    """A kernel that gives the signals of the exchange has been launched."""
    if tail is not None:
        tail.is_given = True


@cache
def tail_numbers(me: int, patience: float, ranks: int, clocked: bool) -> TailNumbers:
    return TailNumbers(me, patience_limit(patience, clocked), True, ranks, lanes_of(ranks), clocked)


def lanes_of(ranks: int) -> int:
    """A lane for each rank."""
    return triton.next_power_of_2(ranks)


def patience_limit(patience: float, clocked: bool) -> int:
    """Nanoseconds, or looks."""
    return int(patience * NANOSECONDS) if clocked else int(patience)


@cache
def bind_signals(tail: TailNumbers) -> KeptLaunch:
    numbers = (tail.me, tail.patience, tail.ranks, tail.width, tail.clocked)
    return KeptLaunch(exchange_signals_kernel, (1,), BoundArguments((), numbers), 1)


def launch_exchange_signals(tail: ExchangeTail) -> None:
    tensors, numbers = tail_arguments(tail, tail.lost)
    addresses, fault_2, _ = tensors
    launch = bind_signals(numbers)
    launch(addresses, fault_2)
