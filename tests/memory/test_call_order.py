"""The order of a tape's calls in two processes: each waits for what touched its memory before, and for nothing else."""

from __future__ import annotations

import random

from moefold.memory.call_order import Touched, awaited_calls, meetings, order_of_two


def test_a_call_waits_for_earlier_ones_that_touched_the_same_bytes_unless_both_read():
    calls = [
        Touched(reads=[], writes=[(0, 8)]),
        Touched(reads=[(0, 4)], writes=[(16, 20)]),
        Touched(reads=[(4, 8)], writes=[(20, 24)]),
        Touched(reads=[(16, 24)], writes=[(0, 2)]),
        Touched(reads=[(2, 8)], writes=[(100, 101)]),
    ]
    assert awaited_calls(calls) == [[], [0], [0], [0, 1, 2], [0]]


def test_parts_of_one_call_do_not_wait_for_each_other():
    calls = [Touched([], [(0, 8)]), Touched([(0, 4)], [(8, 16)], 7), Touched([(4, 8)], [(8, 16)], 7)]
    assert awaited_calls([*calls, Touched([(8, 9)], [(0, 1)])]) == [[], [0], [0], [0, 1, 2]]


def random_calls(count: int, seed: int) -> tuple[list[list[int]], list[float]]:
    draw = random.Random(seed)
    awaited = [sorted(draw.sample(range(call), min(call, draw.randint(0, 3)))) for call in range(count)]
    return awaited, [draw.uniform(1e-6, 1e-4) for _ in range(count)]


def test_two_processes_that_wait_where_they_meet_keep_every_order_that_matters():
    for seed in range(20):
        awaited, seconds = random_calls(60, seed)
        order = order_of_two(awaited, seconds)
        assert sorted(order.lanes[0] + order.lanes[1]) == list(range(60))
        waits = meetings(order, awaited)
        has_run: set[int] = set()
        positions = [0, 0]
        while len(has_run) < 60:
            before = len(has_run)
            for lane in (seed % 2, 1 - seed % 2):  # one runs as far as it can, then the other
                covered = {meeting.position: meeting.awaited for meeting in waits[lane]}
                while positions[lane] < len(order.lanes[lane]):
                    position = positions[lane]
                    if positions[1 - lane] <= covered.get(position, -1):
                        break
                    call = order.lanes[lane][position]
                    assert has_run.issuperset(awaited[call])
                    has_run.add(call)
                    positions[lane] += 1
            assert len(has_run) > before, "each waits for the other"


def test_calls_that_do_not_wait_for_each_other_run_at_once_and_a_chain_stays_in_one_process():
    free = order_of_two([[], [], [], []], [1e-3] * 4)
    assert free.seconds == 2e-3
    chain = order_of_two([[], [0], [1], [2]], [1e-3] * 4)
    assert sorted(map(len, chain.lanes)) == [0, 4]
