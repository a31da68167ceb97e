"""Messages that a pipeline rank receives, posted in the order in which each sender's program sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from moefold.comm.p2p import PendingReceive, PipelineChannel
from moefold.schedule.program import PipelineOp, Program


def messages_between(program: Program, homes: Sequence[int], source: int, to: int) -> list[PipelineOp]:
    """The ops of rank `to` that rank `source` sends a tensor for, in the order of sending: a forward's output goes to
    the next stage's forward, a data gradient to the data gradient of the stage before."""
    last = len(homes) - 1
    receivers: list[PipelineOp] = []
    for slot in program[source]:
        for op in slot:
            if op.kind == "F" and op.stage < last and homes[op.stage + 1] == to:
                receivers.append(PipelineOp("F", op.stage + 1, op.microbatch))
            if op.kind == "D" and op.stage > 0 and homes[op.stage - 1] == to:
                receivers.append(PipelineOp("D", op.stage - 1, op.microbatch))
    return receivers


def incoming_messages(program: Program, homes: Sequence[int], rank: int) -> dict[int, list[PipelineOp]]:
    """By sender: the ops of `rank` that wait for its messages, in the order of sending."""
    senders = [other for other in range(len(program)) if other != rank]
    return {sender: messages_between(program, homes, sender, rank) for sender in senders}


class Inbox:
    """The receives of one run of a program. `empty` makes the tensor that an op's message is received into."""

    def __init__(
        self,
        messages: Mapping[int, Sequence[PipelineOp]],
        pipe: PipelineChannel,
        empty: Callable[[PipelineOp], torch.Tensor],
    ):
        self.pipe, self.empty = pipe, empty
        self.unposted = {rank: deque(ops) for rank, ops in messages.items()}
        self.sender = {op: rank for rank, ops in messages.items() for op in ops}
        self.arriving: dict[PipelineOp, PendingReceive] = {}

    def expect(self, ops: Sequence[PipelineOp]) -> None:
        """Post the receives for these ops, and those of messages that the same senders send before."""
        for op in ops:
            while op in self.sender and op not in self.arriving:
                rank = self.sender[op]
                first = self.unposted[rank].popleft()
                self.arriving[first] = self.pipe.receive(self.empty(first), rank)

    def take(self, op: PipelineOp) -> torch.Tensor:
        """Wait for an op's message."""
        self.expect([op])
        del self.sender[op]
        return self.arriving.pop(op).arrived()
