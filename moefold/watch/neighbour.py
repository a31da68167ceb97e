"""The neighbour of a rank: the next rank of the same node, whose process it looks at with every heartbeat.

A process that is stopped (SIGSTOP) holds up all ranks, and the system says so at once: it is reported after half a
second, not at the limit of a step. Ranks of a node watch each other in a ring, so that any number of them may be
stopped but all. Time that the watching rank was itself stopped does not count, nor does a debugger.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.layout.environment import Rendezvous
from moefold.watch.hang_report import RankState, is_stopped

STOPPED_LOOKS = 5  # in a row
STOPPED_SECONDS = 0.1  # from one look at a stopped process to the next

ReadState = Callable[[int], RankState]  # the last heartbeat of a rank


class Neighbour:
    def __init__(self, place: Rendezvous, host: str):
        first = place.rank - place.local_rank
        self.rank = first + (place.local_rank + 1) % place.local_size
        self.is_itself = self.rank == place.rank
        self.host = host
        self.pid = 0  # not yet heard of
        self.stopped = 0  # looks in a row

    def look(self, read_state: ReadState) -> str:
        """Why an alarm is due; empty where none is."""
        if self.is_itself:
            return ""
        if not self.pid:
            self.hear(read_state(self.rank))
        self.stopped = self.stopped + 1 if self.pid and is_stopped(self.pid) else 0
        if self.stopped < STOPPED_LOOKS:
            return ""
        return f"rank {self.rank} was stopped, and does not go on"

    def hear(self, state: RankState) -> None:
        if state.host == self.host:
            self.pid = state.pid
