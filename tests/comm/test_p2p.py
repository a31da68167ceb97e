"""Messages between two ranks arrive in the order of sending, of any shape; sums of some ranks leave others alone."""

from __future__ import annotations

import pytest
import torch

from moefold.comm import byte_counters
from moefold.comm.p2p import PipelineChannel, sum_over_members
from moefold.layout.axes import World
from tests.support.ranks import run_ranks

SHAPES = [(3,), (2, 5), (1000, 70), (1,), (0, 4), (64, 64), (3,)]  # small ones, some that no buffer holds, an empty one


def message(source: int, to: int, number: int) -> torch.Tensor:
    return torch.full(SHAPES[number % len(SHAPES)], 100.0 * source + 10 * to + number)


def ring(world: World, ahead: int) -> list[str]:
    """Everyone sends a row of messages to both neighbours and receives theirs, `ahead` of which it asks for before."""
    axis = world.axis("pipe")
    pipe, wrong = PipelineChannel(axis), []
    near = sorted({(axis.index + 1) % axis.size, (axis.index - 1) % axis.size})
    count = 2 * len(SHAPES)
    coming = {
        rank: [pipe.receive(torch.empty_like(message(rank, axis.index, n)), rank) for n in range(ahead)]
        for rank in near
    }
    for number in range(count):
        for rank in near:
            pipe.send(message(axis.index, rank, number), rank)
    for number in range(count):
        for rank in near:
            if number >= ahead:
                coming[rank].append(pipe.receive(torch.empty_like(message(rank, axis.index, number)), rank))
            if not torch.equal(coming[rank][number].arrived(), message(rank, axis.index, number)):
                wrong.append(f"message {number} of {rank}")
    pipe.flush()
    return wrong + (["something is kept"] if pipe.pending_sends else [])


@pytest.mark.parametrize("ahead", [0, 3])
def test_messages_arrive_in_the_order_of_sending_whether_asked_for_before_or_after(ahead: int):
    assert run_ranks(ring, 4, ahead, pp=4) == [[]] * 4


def count_sent(world: World) -> dict[tuple[str, str], int]:
    axis = world.axis("pipe")
    pipe = PipelineChannel(axis)
    with byte_counters.counted_bytes_sent() as sent:
        if axis.index == 0:
            pipe.send(torch.zeros(3, 5, dtype=torch.float64), 1)
        else:
            pipe.receive(torch.empty(3, 5, dtype=torch.float64), 0).arrived()
        pipe.flush()
    return dict(sent)


def test_bytes_are_counted_where_they_leave():
    assert run_ranks(count_sent, 2, pp=2) == [{("pipe", "pipe"): 120}, {}]


def uneven(rank: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of adding."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)
    return values * 10.0 ** torch.arange(-4, 4).repeat(125)


MEMBERS = [(0, 1, 3), (0, 3), (2,), (0, 1, 2, 3), (1, 2)]


def sum_some(world: World) -> list[tuple[torch.Tensor, bool]]:
    found = []
    for members in MEMBERS:
        mine = uneven(world.rank)
        total = sum_over_members(mine, members, world.axis("pipe"))
        found.append((total, torch.equal(mine, uneven(world.rank))))
    return found


def test_a_sum_among_some_ranks_has_the_same_bits_on_all_of_them_and_leaves_others_as_they_are():
    by_rank = run_ranks(sum_some, 4, pp=4)
    for number, members in enumerate(MEMBERS):
        right = uneven(members[0])
        for member in members[1:]:
            right = right + uneven(member)  # in the order of ranks
        for rank in range(4):
            total, kept = by_rank[rank][number]
            assert kept, "what was given is not changed"
            assert torch.equal(total, right if rank in members else uneven(rank)), (members, rank)


def sum_beside_pipeline(world: World) -> bool:
    """Two pipelines, dp 2 x pp 2, each with sums of its own."""
    total = sum_over_members(uneven(world.rank), (0, 1), world.axis("pipe"))
    first, second = world.axis("pipe").ranks
    return torch.equal(total, uneven(first) + uneven(second))


def test_members_are_counted_along_the_pipeline_not_in_the_world():
    assert all(run_ranks(sum_beside_pipeline, 4, pp=2))
