"""Two strands of work on two lanes, in the order that `weave` gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moefold.comm.lanes import Lanes, Ticket
from moefold.layout.deferred_wgrad import DeferredWork
from moefold.observe.trace import SpanRecorder


class PairRunner:
    """Runs pieces in the order given, each strand in its own order, on two lanes. Whenever the compute lane would wait,
    it takes one of the `fillers`; what is left of them is done at the end."""

    def __init__(self, lanes: Lanes, spans: SpanRecorder, fillers: list[DeferredWork]):
        self.lanes, self.spans, self.fillers = lanes, spans, fillers
        self.under_way: dict[int, Ticket] = {}

    def begin(self, strand: int, lane: str, name: str, work: Callable[[], object], inputs: object = None) -> None:
        """What the comm lane does of a strand comes before what follows in that strand; it keeps its own order. The
        lanes keep the memory of `inputs`, and of what the work returns, for each other."""
        if lane == "comm":
            self.under_way[strand] = self.lanes.send(partial(self.run_in_span, name, lane, work), inputs)
        else:
            self.await_strand(strand)
            self.run_in_span(name, lane, work)

    def run_in_span(self, name: str, lane: str, work: Callable[[], object]) -> object:
        with self.spans.span(name, lane):
            return work()

    def await_strand(self, strand: int) -> None:
        ticket = self.under_way.pop(strand, None)
        if ticket is None:
            return
        while self.fillers and not ticket.done():
            self.run_in_span("weights", "compute", self.fillers.pop(0))
        with self.spans.span("wait", "waiting"):
            ticket.result()

    def end(self) -> None:
        for strand in list(self.under_way):
            self.await_strand(strand)
        while self.fillers:
            self.run_in_span("weights", "compute", self.fillers.pop(0))
