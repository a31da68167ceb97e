"""Execution of a paired slot: two strands of work on the compute lane and the comm lane."""

from __future__ import annotations

from collections.abc import Callable

from moefold.comm.lanes import Lanes, Ticket
from moefold.layout.deferred_wgrad import DeferredWork
from moefold.observe.trace import SpanRecorder


class PairRunner:
    """Runs pieces in the order in which they are begun, each strand in its own order. Whenever the compute lane would
    wait for the comm lane, it runs one of the `fillers`; the rest of them run at the end."""

    def __init__(self, lanes: Lanes, spans: SpanRecorder, fillers: list[DeferredWork]):
        self.lanes = lanes
        self.spans = spans
        self.fillers = fillers
        self.under_way: dict[int, Ticket] = {}

    def begin(self, strand: int, lane: str, work: Callable[[], object], inputs: object = None) -> None:
        """Begin the next piece of a strand. A piece on the comm lane ends before the strand's next compute piece
        begins. The lanes keep the memory of `inputs`, and of what `work` returns, for each other."""
        if lane == "comm":
            self.under_way[strand] = self.lanes.send(work, inputs)
        else:
            self.await_strand(strand)
            work()

    def await_strand(self, strand: int) -> None:
        ticket = self.under_way.pop(strand, None)
        if ticket is None:
            return
        while self.fillers and not ticket.done():
            self.run_next_filler()
        with self.spans.span("wait", "waiting"):
            ticket.result()

    def run_next_filler(self) -> None:
        with self.spans.span("weights", "compute"):
            work = self.fillers.pop(0)
            work()

    def end(self) -> None:
        """Wait for all pieces, and run the fillers that are left."""
        for strand in list(self.under_way):
            self.await_strand(strand)
        while self.fillers:
            self.run_next_filler()
