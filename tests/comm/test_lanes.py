"""The comm lane runs beside the compute lane, keeps its order, and hands back what it found or what went wrong."""

from __future__ import annotations

import threading

import pytest
import torch

from moefold.comm.lanes import Lanes

CPU = torch.device("cpu")


def test_work_runs_beside_the_caller_and_in_the_order_it_was_given():
    lanes, may_go, order = Lanes(CPU), threading.Event(), []

    def first() -> int:
        assert may_go.wait(10)
        order.append("first")
        return 1

    tickets = [lanes.send(first), lanes.send(lambda: order.append("second"))]
    assert not tickets[0].done(), "the caller goes on while it runs"
    assert not tickets[1].done(), "what was given later waits for what was given before"
    order.append("caller")
    may_go.set()
    assert tickets[1].result() is None
    assert tickets[0].done()
    assert tickets[0].result() == 1
    assert order == ["caller", "first", "second"]


def test_all_work_runs_on_one_thread_that_is_not_the_callers():
    lanes = Lanes(CPU)
    found = {lanes.send(threading.get_ident).result() for _ in range(5)}
    assert len(found) == 1
    assert threading.get_ident() not in found


def test_what_goes_wrong_on_the_lane_is_told_to_whoever_waits_and_the_lane_goes_on():
    lanes = Lanes(CPU)
    ticket = lanes.send(lambda: [][0])
    with pytest.raises(IndexError):
        ticket.result()
    with pytest.raises(IndexError):
        ticket.done()
    assert lanes.send(lambda: "still there").result() == "still there"


def test_a_result_may_be_asked_for_more_than_once():
    ticket = Lanes(CPU).send(lambda: torch.ones(2))
    assert ticket.result() is ticket.result()


def test_gradients_flow_through_what_ran_on_the_lane():
    """A step's forward on the comm lane, its backward on the compute lane, and the reverse."""
    lanes, x = Lanes(CPU), torch.ones(3, requires_grad=True)
    y = lanes.send(lambda: x * 2).result()
    lanes.send(lambda: (y * 3).sum().backward()).result()
    assert torch.equal(x.grad, torch.full((3,), 6.0))  # pyright: ignore[reportArgumentType]
