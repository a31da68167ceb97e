"""Messages that a pipeline rank receives, posted in the order in which each sender's program sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from moefold.comm.p2p import PendingReceive, PipelineChannel
from moefold.schedule.program import PipelineOp, Program

Homes = Sequence[int]  # the pipeline rank of each stage
Messages = list[PipelineOp]  # the ops that wait for them


def messages_between(program: Program, homes: Homes, source: int, to: int) -> Messages:
    """The ops of rank `to` that rank `source` sends a tensor for, in the order of sending: a forward's output goes to
    the next stage's forward, a data gradient to the data gradient of the stage before."""
    neighbour = {"F": 1, "D": -1}
    messages: Messages = []
    for op in chain.from_iterable(program[source]):
        if op.kind not in neighbour:
            continue
        stage = op.stage + neighbour[op.kind]
        is_stage = 0 <= stage < len(homes)
        if is_stage and homes[stage] == to:
            receiver = op._replace(stage=stage)
            messages.append(receiver)
    return messages


def incoming_messages(program: Program, homes: Homes, rank: int) -> dict[int, Messages]:
    """By sender: the ops of `rank` that wait for its messages, in the order of sending."""
    messages: dict[int, Messages] = {}
    for sender in range(len(program)):
        if sender != rank:
            messages[sender] = messages_between(program, homes, sender, rank)
    return messages


class Inbox:
    """The receives of one run of a program. `empty` makes the tensor that an op's message is received into."""

    def __init__(
        self,
        messages: Mapping[int, Sequence[PipelineOp]],
        pipe: PipelineChannel,
        empty: Callable[[PipelineOp], Tensor],
    ):
        self.pipe = pipe
        self.empty = empty
        self.unposted: dict[int, deque[PipelineOp]] = {}
        self.sender: dict[PipelineOp, int] = {}
        for rank, ops in messages.items():
            self.unposted[rank] = deque(ops)
            sent = dict.fromkeys(ops, rank)
            self.sender.update(sent)
        self.arriving: dict[PipelineOp, PendingReceive] = {}

    def expect(self, ops: Sequence[PipelineOp]) -> None:
        """Post the receives for these ops, and those of messages that the same senders send before."""
        for op in ops:
            while op in self.sender and op not in self.arriving:
                rank = self.sender[op]
                first = self.unposted[rank].popleft()
                memory = self.empty(first)
                receive = self.pipe.receive(memory, rank)
                self.arriving[first] = receive

    def take(self, op: PipelineOp) -> Tensor:
        """Wait for an op's message."""
        self.expect([op])
        del self.sender[op]
        message = self.arriving.pop(op)
        return message.arrived()
