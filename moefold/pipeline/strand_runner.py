"""Execution of strands of work on the compute lane and the comm lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from moefold.comm.lanes import Lanes, Ticket, keep_for_this_stream
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.model.steps import Carry
from moefold.observe.trace import SpanRecorder
from moefold.pipeline.passage import Carries, Gradients, Passage
from moefold.pipeline.strand_order import PieceKey, Strand, issue_order

DeferredQueue = list[DeferredWork]


class StrandWork(Protocol):
    """The work of a strand's pieces. What `take_inputs` returns is read by the piece, what `run` returns by others:
    the lanes keep the memory of both for each other. Each piece takes its inputs on the lane that runs it."""

    @property
    def pieces(self) -> Strand: ...

    def take_inputs(self, number: int) -> Any: ...

    def run(self, number: int, inputs: Any) -> object: ...


@dataclass
class ForwardWork:
    """The forward of a pass, whose first carry is set."""

    passage: Passage
    pieces: Strand

    def take_inputs(self, number: int) -> Carries:
        return self.passage.take_inputs(number)

    def run(self, number: int, inputs: Carries) -> Carry:
        return self.passage.run_forward(number, inputs)


@dataclass
class BackwardWork:
    """The backward of a pass, from its last segment on. Weight gradients go into the queue, if there is one."""

    passage: Passage
    pieces: Strand
    queue: DeferredQueue | None

    def take_inputs(self, number: int) -> Gradients:
        segment = self.passage.last - number
        return self.passage.take_gradients(segment)

    def run(self, number: int, inputs: Gradients) -> Gradients:
        segment = self.passage.last - number
        if self.queue is None:
            return self.passage.run_backward(segment, inputs)
        with deferring_weight_grads(self.queue):
            return self.passage.run_backward(segment, inputs)


@dataclass
class StrandRunner:
    """Runs strands interleaved. Whenever the compute lane would wait for the comm lane, it runs one of the `fillers`;
    the rest of them run at the end."""

    lanes: Lanes
    spans: SpanRecorder
    fillers: DeferredQueue
    under_way: dict[PieceKey, Ticket] = field(default_factory=dict[PieceKey, Ticket])
    readers: Counter[PieceKey] = field(default_factory=Counter[PieceKey])  # pieces that have still to begin behind it

    def run(self, strands: Sequence[StrandWork]) -> None:
        pieces = tuple(strand.pieces for strand in strands)
        self.readers = count_readers(pieces)
        for strand, number in issue_order(pieces):
            work = strands[strand]
            self.begin(strand, number, work)
        self.end()

    def begin(self, strand: int, number: int, work: StrandWork) -> None:
        """Begin a piece when the compute that it needs has ended. A piece on the compute lane has ended when this
        returns."""
        piece = work.pieces[number]
        if piece.lane == "comm":
            before = [self.ticket_behind((strand, need)) for need in piece.needs]
            run = partial(run_on_comm_lane, work, number, before)
            self.under_way[strand, number] = self.lanes.send(run)
            return
        for need in piece.needs:
            self.await_piece((strand, need))
        inputs = work.take_inputs(number)
        work.run(number, inputs)

    def ticket_behind(self, key: PieceKey) -> Ticket | None:
        """The ticket of a piece, if nobody has waited for it. The last piece that needs it takes the ticket away, which
        keeps results."""
        self.readers[key] -= 1
        if self.readers[key] == 0:
            return self.under_way.pop(key, None)
        return self.under_way.get(key)

    def await_piece(self, key: PieceKey) -> None:
        ticket = self.under_way.pop(key, None)
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
        for key in list(self.under_way):
            self.await_piece(key)
        while self.fillers:
            self.run_next_filler()


def count_readers(strands: Sequence[Strand]) -> Counter[PieceKey]:
    """How many pieces need each piece."""
    readers = Counter[PieceKey]()
    for number, strand in enumerate(strands):
        for piece in strand:
            readers.update((number, need) for need in piece.needs)
    return readers


def run_on_comm_lane(work: StrandWork, number: int, before: Sequence[Ticket | None]) -> object:
    """Run a piece behind those `before` it on the lane; if one of them has failed, its error is this one's too."""
    for ticket in before:
        if ticket is not None:
            ticket.require_success()
    inputs = work.take_inputs(number)
    keep_for_this_stream(inputs)
    return work.run(number, inputs)
