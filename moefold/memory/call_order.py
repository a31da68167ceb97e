"""In which order two processes run the calls of a tape: what each call has to wait for, and who runs it when.

A call waits for earlier calls that touched the same bytes, unless both only read them. Of the calls that nothing holds
up, the one that can begin first is given to the process that can begin it first; of several, the one with the longest
way to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Bytes = tuple[int, int]  # begin and end
HAND_OVER = 10e-6  # seconds until a process sees what the other one has written
BOTH = (0, 1)


class Touched(NamedTuple):
    """The memory of a call. Calls of one `whole`, a number above 0, are parts of one call, which do not wait for each
    other."""

    reads: list[Bytes]
    writes: list[Bytes]
    whole: int = 0


class Order(NamedTuple):
    """The calls of each process, by number, and the time at which both have run."""

    lanes: tuple[list[int], list[int]]
    seconds: float


def awaited_calls(calls: Sequence[Touched]) -> list[list[int]]:
    """For each call the earlier ones that it has to wait for."""
    begins, ends, owners, are_writes = flat_ranges(calls)
    wholes = np.array([call.whole for call in calls])
    awaited: list[list[int]] = []
    known = 0  # ranges of earlier calls
    for call in calls:
        found = np.zeros(known, dtype=bool)
        for is_write, ranges in ((False, call.reads), (True, call.writes)):
            for begin, end in ranges:
                overlaps = (begins[:known] < end) & (ends[:known] > begin)
                found |= overlaps if is_write else overlaps & are_writes[:known]
        earlier = np.unique(owners[:known][found])
        if call.whole:
            earlier = earlier[wholes[earlier] != call.whole]
        awaited.append(earlier.tolist())
        known += len(call.reads) + len(call.writes)
    return awaited


def flat_ranges(calls: Sequence[Touched]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Begins and ends of all ranges, the calls that they are of, and whether they are written."""
    rows: list[tuple[int, int, int, bool]] = []
    for number, call in enumerate(calls):
        rows += [(begin, end, number, False) for begin, end in call.reads]
        rows += [(begin, end, number, True) for begin, end in call.writes]
    begins, ends, owners, are_writes = zip(*rows, strict=True)
    return np.array(begins), np.array(ends), np.array(owners), np.array(are_writes)


def order_of_two(awaited: Sequence[Sequence[int]], seconds: Sequence[float], hand_over: float = HAND_OVER) -> Order:
    followers = followers_of(awaited)
    to_the_end = seconds_to_the_end(followers, seconds)
    missing = [len(earlier) for earlier in awaited]
    done_at = [0.0] * len(seconds)
    lane_of = [0] * len(seconds)
    free_at = [0.0, 0.0]
    lanes: tuple[list[int], list[int]] = ([], [])

    def ready_times(call: int) -> tuple[float, float]:
        """When each process sees all that the call waits for."""
        times = [0.0, 0.0]
        for earlier in awaited[call]:
            for lane in BOTH:
                seen = done_at[earlier] + (hand_over if lane_of[earlier] != lane else 0.0)
                times[lane] = max(times[lane], seen)
        return times[0], times[1]

    open_calls = {call: (0.0, 0.0) for call, count in enumerate(missing) if count == 0}
    while open_calls:
        choices = (
            (max(free_at[lane], ready[lane]), -to_the_end[call], call, lane)
            for call, ready in open_calls.items()
            for lane in BOTH
        )
        begin, _, call, lane = min(choices)
        del open_calls[call]
        lanes[lane].append(call)
        lane_of[call] = lane
        free_at[lane] = done_at[call] = begin + seconds[call]
        for follower in followers[call]:
            missing[follower] -= 1
            if missing[follower] == 0:
                open_calls[follower] = ready_times(follower)
    return Order(lanes, max(free_at))


def followers_of(awaited: Sequence[Sequence[int]]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in awaited]
    for call, earlier in enumerate(awaited):
        for other in earlier:
            followers[other].append(call)
    return followers


def seconds_to_the_end(followers: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Of each call, with the calls that wait for it: the least time until the last has run."""
    lengths = [0.0] * len(seconds)
    for call in reversed(range(len(seconds))):
        lengths[call] = seconds[call] + max((lengths[follower] for follower in followers[call]), default=0.0)
    return lengths


class Meeting(NamedTuple):
    """Before its call at `position` a process waits until the other has run its call at `awaited`."""

    position: int
    awaited: int


def meetings(order: Order, awaited: Sequence[Sequence[int]]) -> tuple[list[Meeting], list[Meeting]]:
    """The waits of each process; what an earlier wait has covered is not waited for again."""
    place: dict[int, tuple[int, int]] = {}
    for lane, calls in enumerate(order.lanes):
        for position, call in enumerate(calls):
            place[call] = (lane, position)
    found: tuple[list[Meeting], list[Meeting]] = ([], [])
    for lane, calls in enumerate(order.lanes):
        covered = -1
        for position, call in enumerate(calls):
            others = (place[earlier] for earlier in awaited[call])
            latest = max((at for other, at in others if other != lane), default=-1)
            if latest > covered:
                found[lane].append(Meeting(position, latest))
                covered = latest
    return found
