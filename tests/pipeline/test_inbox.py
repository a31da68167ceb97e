"""What a rank receives follows from the program: every message once, in the order in which its sender sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.layout.axes import Axis
from moefold.pipeline.inbox import Inbox, incoming_messages, messages_between
from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import PipelineOp, Program, op_dependencies, ops_with_ranks, rank_by_stage
from moefold.schedule.schedule_catalog import SCHEDULES, build_program

PASSES = {
    "as it is": lambda program: program,
    "paired": pair_forward_with_backward,
    "deferred": defer_weight_grads,
    "both": lambda program: defer_weight_grads(pair_forward_with_backward(program)),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[int]]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp, m = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    vpp = draw(st.sampled_from([v for v in (1, 2, 3) if SCHEDULES[name].accepts_vpp(v)]))
    program = PASSES[draw(st.sampled_from(sorted(PASSES)))](build_program(name, pp, vpp, m))
    return program, [SCHEDULES[name].rank_of(stage, pp) for stage in range(pp * vpp)]


@settings(deadline=None)
@given(programs())
def test_every_forward_and_data_gradient_that_crosses_ranks_is_one_message(made: tuple[Program, list[int]]):
    program, homes = made
    assert homes == rank_by_stage(program)
    ranks = range(len(program))
    found = Counter((a, b, op) for a in ranks for b in ranks if a != b for op in messages_between(program, homes, a, b))
    expected = Counter(
        (homes[need.stage], rank, op)
        for rank, op in ops_with_ranks(program)
        for need in op_dependencies(op, len(homes) - 1)
        if need.kind == op.kind and homes[need.stage] != rank
    )
    assert found == expected
    assert not found or set(found.values()) == {1}


@settings(deadline=None)
@given(programs())
def test_messages_come_in_the_order_in_which_their_sender_runs(made: tuple[Program, list[int]]):
    program, homes = made
    for a in range(len(program)):
        place = {op: i for i, op in enumerate(op for slot in program[a] for op in slot)}
        for b in range(len(program)):
            came_from = [
                PipelineOp(op.kind, op.stage + (-1 if op.kind == "F" else 1), op.microbatch)
                for op in messages_between(program, homes, a, b)
            ]
            places = [place[op] for op in came_from]
            assert places == sorted(places)


class Wire:
    """Stands for a pipe: notes what is asked for, and gives the op that the sender sent at that place."""

    def __init__(self, program: Program, homes: list[int], me: int):
        self.axis = Axis("pipe", tuple(range(len(program))), me)
        self.sent = {rank: messages_between(program, homes, rank, me) for rank in range(len(program)) if rank != me}
        self.asked: Counter[int] = Counter()

    def receive(self, like: Any, source: int) -> Any:
        op = self.sent[source][self.asked[source]]
        self.asked[source] += 1
        wire, arrived = self, like

        class Coming:
            def arrived(self) -> tuple[Any, PipelineOp, int]:
                return arrived, op, wire.asked.total()

        return Coming()


@settings(deadline=None)
@given(programs(), st.integers(0, 3))
def test_every_op_takes_what_was_sent_for_it_into_a_place_made_for_it(made: tuple[Program, list[int]], ahead: int):
    program, homes = made
    for me, slots in enumerate(program):
        wire: Any = Wire(program, homes, me)
        inbox = Inbox(incoming_messages(program, homes, me), wire, lambda op: op)  # pyright: ignore[reportArgumentType]
        for number, slot in enumerate(slots):
            inbox.expect([op for near in slots[number : number + ahead] for op in near])
            for op in slot:
                if any(op in ops for ops in wire.sent.values()):
                    place, sent, _ = inbox.take(op)  # pyright: ignore[reportGeneralTypeIssues]
                    assert place == op == sent
        assert not inbox.arriving, "nothing was asked for that no op took"
        assert all(wire.asked[rank] == len(ops) for rank, ops in wire.sent.items()), "nothing is left on the wire"


def test_waiting_for_a_later_message_asks_for_the_ones_before_it_first():
    program: Program = [
        [(PipelineOp("F", 0, 0),), (PipelineOp("F", 0, 1),)],
        [(PipelineOp("F", 1, 1),), (PipelineOp("F", 1, 0),)],
    ]
    wire: Any = Wire(program, [0, 1], 1)
    inbox = Inbox(incoming_messages(program, [0, 1], 1), wire, lambda op: torch.empty(0))
    assert inbox.take(PipelineOp("F", 1, 1))[1] == PipelineOp("F", 1, 1)
    assert wire.asked[0] == 2
    assert inbox.take(PipelineOp("F", 1, 0))[1] == PipelineOp("F", 1, 0)
    assert wire.asked[0] == 2


def test_what_nobody_sends_cannot_be_taken():
    program: Program = [[(PipelineOp("F", 0, 0),)], [(PipelineOp("F", 1, 0),)]]
    wire: Any = Wire(program, [0, 1], 1)
    with pytest.raises(KeyError):
        Inbox(incoming_messages(program, [0, 1], 1), wire, lambda op: torch.empty(0)).take(PipelineOp("F", 1, 5))
