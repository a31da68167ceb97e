"""What arrives at a pipeline rank, asked for in the order in which each sender's program sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from moefold.comm.p2p import PendingReceive, PipelineChannel
from moefold.schedule.program import PipelineOp, Program


def messages_between(program: Program, homes: Sequence[int], source: int, to: int) -> list[PipelineOp]:
    """The ops of `to` that `source` sends something for, in the order of sending: a forward's result goes to the next
    stage's forward, a data gradient to that of the stage before."""
    last = len(homes) - 1
    found: list[PipelineOp] = []
    for op in (op for slot in program[source] for op in slot):
        if op.kind == "F" and op.stage < last and homes[op.stage + 1] == to:
            found.append(PipelineOp("F", op.stage + 1, op.microbatch))
        if op.kind == "D" and op.stage > 0 and homes[op.stage - 1] == to:
            found.append(PipelineOp("D", op.stage - 1, op.microbatch))
    return found


class Inbox:
    def __init__(
        self, program: Program, homes: Sequence[int], pipe: PipelineChannel, empty: Callable[[PipelineOp], torch.Tensor]
    ):
        self.pipe, self.empty, me = pipe, empty, pipe.axis.index
        others = [rank for rank in range(len(program)) if rank != me]
        self.coming = {rank: deque(messages_between(program, homes, rank, me)) for rank in others}
        self.sender = {op: rank for rank, ops in self.coming.items() for op in ops}
        self.arriving: dict[PipelineOp, PendingReceive] = {}

    def expect(self, ops: Sequence[PipelineOp]) -> None:
        """Begin to receive what these ops need, and whatever its senders send before it."""
        for op in ops:
            while op in self.sender and op not in self.arriving:
                rank = self.sender[op]
                first = self.coming[rank].popleft()
                self.arriving[first] = self.pipe.receive(self.empty(first), rank)

    def take(self, op: PipelineOp) -> torch.Tensor:
        self.expect([op])
        del self.sender[op]
        return self.arriving.pop(op).arrived()
