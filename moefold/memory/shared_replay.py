"""Replays of a tape by two processes, each with one thread: this one and a helper that it forks.

Small ops are not worth the threads of one op, but two of them run as quickly as one where neither waits for the other:
a weight's gradient beside that of the input, one half of the sequences beside the other. The bits stay, since every op
is the same op on the same numbers.

    first replays   timed, by this process alone
    order           which process runs which call, and where it waits for the other (call_order.py)
    memory          all that the calls touch moves to memory that both processes have, at the same addresses
    replay          both run their calls; semaphores tell how far the other one is
    trials          now and then some replays by one process and some by both: the faster way goes on

Where other work takes one of the cores, two processes wait for each other and lose to one.

Two threads would wait for Python's lock: an op of a few microseconds holds it for half of its time.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from math import inf
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from moefold.memory.call_halves import call_in_halves, name_of, tensors_of, touched_by
from moefold.memory.call_order import Order, awaited_calls, meetings, order_of_two
from moefold.memory.tape import Plan, PlannedCall, Prepared, Tape, TapeRecorder, run_calls, without_autograd

T = TypeVar("T")
Way = Callable[[], None]
TIMED_REPLAYS = 5
REST = 30  # calls for which freed memory is left alone
SPINS = 2000  # looks at a semaphore, a fifth of a millisecond, before a process sleeps
PATIENCE = 1.0  # seconds between looks at whether the other process is there
SHARED_MEMORY = "/dev/shm"
ATTENTION = "aten::_scaled_dot_product"  # draws numbers for dropout alone, which has no kernel on a CPU
LEAST_GAIN = 1.15  # of two processes by the order's own times; for less, one goes on alone
TRIALS = 2  # replays of each way, of which the faster counts: a short disturbance decides nothing
PERIOD = 60  # replays from trials to trials: these take less than 3 % of the time

ENDED = "the process that shares the replays of the tape has ended"


class HelperEnded(RuntimeError):
    """The process that shares replays has ended in the middle of a step."""


class SharedTapeRecorder(TapeRecorder):
    """Records a step on a CPU whose replays two processes share. All steps run on one thread, as the replays do: sums
    depend on the number of threads. `remarks`: why one process goes on alone, if it does."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def run(self, work: Callable[[], T]) -> T:
        with one_thread():
            return work()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None] | str]:
        with one_thread():
            return super().record(work)

    def replay_of(self, tape: Tape) -> Callable[[], None]:
        return SharedReplay(Plan(tape, REST), self.remarks).replay


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SharedReplay:
    def __init__(self, plan: Plan, remarks: list[str]):
        self.plan = plan
        self.remarks = remarks
        groups = [call_in_halves(call) for call in plan.calls]
        self.calls = list(chain.from_iterable(groups))
        self.wholes = [number if len(group) > 1 else 0 for number, group in enumerate(groups, 1) for _ in group]
        self.prepared = [call.prepared() for call in self.calls]
        self.seconds: list[list[float]] = []
        self.helper: Helper | None = None
        self.ways: TriedWays | None = None  # by one process and by two, from the last timed replay on

    def replay(self) -> None:
        with one_thread():
            if self.ways is not None:
                self.ways.run()
                return
            self.seconds.append(timed_calls(self.prepared))
            if len(self.seconds) == TIMED_REPLAYS:
                self.share()

    def share(self) -> None:
        alone = partial(run_calls, self.prepared)
        self.helper = self.find_helper()
        ways = [alone] if self.helper is None else [alone, self.helper.replay]
        self.ways = TriedWays(ways)

    def find_helper(self) -> Helper | None:
        """A process that takes a part of the calls; None where one goes on alone, with a remark why."""
        seconds = [min(times) for times in zip(*self.seconds, strict=True)]
        touched = [touched_by(call, whole) for call, whole in zip(self.calls, self.wholes, strict=True)]
        awaited = awaited_calls(touched)
        order = order_of_two(awaited, seconds)
        obstacle = self.obstacle(sum(seconds) / order.seconds)
        if obstacle:
            self.remarks.append(obstacle)
            return None
        return Helper(self.prepared, order, awaited)

    def obstacle(self, gain: float) -> str:
        """Why one process goes on alone; empty: memory has been moved, and two may share the replays."""
        if not has_two_cores():
            return "this is no Linux machine with two cores"
        drawing = [name_of(call) for call in self.calls if draws_random_numbers(call)]
        if drawing:
            return f"{drawing[0]} draws numbers from a generator, of which each process would have its own"
        if gain < LEAST_GAIN:
            return f"two would be {gain:.2f} times as fast, and {LEAST_GAIN} is the least"
        return move_to_shared_memory(self.calls)


class TriedWays:
    """Ways to do the same, of which the fastest runs. All are tried again every PERIOD runs, since other work on a
    machine comes and goes."""

    def __init__(self, ways: Sequence[Way]):
        self.ways = ways
        self.runs = 0  # since the last trials began
        self.least = [inf] * len(ways)  # seconds

    def run(self) -> None:
        trial = self.runs // TRIALS
        if self.runs == 0:
            self.least = [inf] * len(self.ways)
        if trial < len(self.ways):
            seconds = seconds_of(self.ways[trial])
            self.least[trial] = min(self.least[trial], seconds)
        else:
            fastest = self.least.index(min(self.least))
            self.ways[fastest]()
        self.runs = (self.runs + 1) % PERIOD


def seconds_of(run: Way) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def draws_random_numbers(call: PlannedCall) -> bool:
    tags = getattr(call.function, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not name_of(call).startswith(ATTENTION)


def has_two_cores() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def timed_calls(calls: list[Prepared]) -> list[float]:
    times = [time.perf_counter()]
    with without_autograd():
        for function, args, kwargs in calls:
            function(*args, **kwargs)
            times.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(times)]


def move_to_shared_memory(calls: list[PlannedCall]) -> str:
    """Why there was no room, if there was none. Tensors keep their storages, whose memory moves; each has an open file
    from then on."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for call in calls for x in tensors_of(call)}
    storages = [storage for storage in storages.values() if not storage.is_shared()]
    if not os.path.isdir(SHARED_MEMORY):
        return f"there is no {SHARED_MEMORY}"
    room = os.statvfs(SHARED_MEMORY)
    needed = sum(storage.nbytes() for storage in storages)
    if needed > room.f_bavail * room.f_frsize // 2:
        return f"{SHARED_MEMORY} has less than twice the {needed} bytes that are needed"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and len(storages) > files // 2:
        return f"{len(storages)} files would be open, of {files} at most"
    for storage in storages:
        storage.share_memory_()
    return ""


HELPERS: set[int] = set()  # processes that this one has forked and that have not ended


class Pair:
    """This process and its helper, as each of them sees the other."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self.helper = 0  # until it is forked, and in the helper itself

    def other_is_there(self) -> bool:
        if self.helper == 0:
            return os.getppid() == self.parent
        if self.helper not in HELPERS:
            return False
        ended, _ = os.waitpid(self.helper, os.WNOHANG)
        if ended:
            HELPERS.discard(self.helper)
        return ended == 0


class Helper:
    """The other process. It ends with this object, or with the process that forked it."""

    def __init__(self, calls: list[Prepared], order: Order, awaited: list[list[int]]):
        context = get_context("fork")
        self.begin = context.Semaphore(0)
        self.end = context.Semaphore(0)
        progress = (context.Semaphore(0), context.Semaphore(0))
        self.pair = Pair()
        self.own, others = lanes_with_waits(calls, order, awaited, progress, self.pair)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the helper runs nothing but ops, on one thread
            self.pair.helper = os.fork()
            if self.pair.helper == 0:
                self.serve(others)
        HELPERS.add(self.pair.helper)
        self.finish = weakref.finalize(self, end_helper, self.pair)

    def replay(self) -> None:
        if not self.pair.other_is_there():
            raise HelperEnded(ENDED)
        try:
            self.begin.release()
            run_calls(self.own)
            wait_for(self.end, self.pair)
        except BaseException:  # an interrupt: where the helper is in the step, nothing tells
            self.finish()
            raise

    def serve(self, calls: list[Prepared]) -> None:
        """In the helper: run the calls of each step, until the parent has ended."""
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)  # a step that has begun is brought to its end
            gc.disable()
            while True:
                wait_for(self.begin, self.pair)
                run_calls(calls)
                self.end.release()
        except HelperEnded:
            pass
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def lanes_with_waits(
    calls: list[Prepared], order: Order, awaited: list[list[int]], progress: tuple[Any, Any], pair: Pair
) -> tuple[list[Prepared], list[Prepared]]:
    """The calls of each process, with its waits and with what tells the other one how far it is."""
    found = meetings(order, awaited)
    lanes: list[list[Prepared]] = []
    for lane in (0, 1):
        waits = {meeting.position for meeting in found[lane]}
        awaited_here = {meeting.awaited for meeting in found[1 - lane]}
        own: list[Prepared] = []
        for position, call in enumerate(order.lanes[lane]):
            if position in waits:
                own.append((wait_for, (progress[1 - lane], pair), {}))
            own.append(calls[call])
            if position in awaited_here:
                own.append((progress[lane].release, (), {}))
        lanes.append(own)
    return lanes[0], lanes[1]


def wait_for(semaphore: Any, pair: Pair) -> None:
    acquire = semaphore.acquire
    for _ in range(SPINS):
        if acquire(False):
            return
    while not acquire(True, PATIENCE):
        if not pair.other_is_there():
            raise HelperEnded(ENDED)


def end_helper(pair: Pair) -> None:
    process = pair.helper
    if os.getpid() != pair.parent:  # a process forked from the run, which leaves the run's helper alone
        return
    if process not in HELPERS:  # it has ended, and its number may be another's
        return
    HELPERS.discard(process)
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
