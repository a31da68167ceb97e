"""A turn of the ring hands a tensor on by one rank."""

from __future__ import annotations

import pytest
import torch

from moefold.comm.ring_shift import RingShift
from moefold.layout.axes import Axis, World
from tests.support.ranks import run_ranks


def turns(world: World, axis_name: str) -> dict[str, list[float]]:
    axis = world.axis(axis_name)
    x = torch.full((2, 3), float(world.rank)).T  # not contiguous
    met, travelling = [], x
    for _ in range(axis.size):
        travelling = RingShift(travelling, axis).arrived()
        assert travelling.shape == x.shape
        assert (travelling == travelling[0, 0]).all()
        met.append(travelling[0, 0].item())
    first, second = RingShift(x, axis), RingShift(x + 100, axis)  # both under way at once
    late, early = second.arrived()[0, 0].item(), first.arrived()[0, 0].item()
    assert (x == world.rank).all(), "what is sent stays as it is"
    return {"met": met, "two": [early, late]}


@pytest.mark.parametrize(
    ("size", "parallel", "rings"),
    [
        (2, {"cp": 2}, [[0, 1]]),
        (4, {"cp": 4}, [[0, 1, 2, 3]]),
        (4, {"cp": 2}, [[0, 1], [2, 3]]),
        (4, {"cp": 2, "tp": 2}, [[0, 2], [1, 3]]),
    ],
)
def test_each_rank_meets_those_before_it_in_turn_and_then_itself(size, parallel, rings):
    found = run_ranks(turns, size, "cp", **parallel)
    for ring in rings:
        for place, rank in enumerate(ring):
            met = [float(ring[(place - hop) % len(ring)]) for hop in range(1, len(ring) + 1)]
            assert found[rank]["met"] == met
            assert found[rank]["two"] == [met[0], met[0] + 100]


def test_alone_the_tensor_itself_arrives():
    x = torch.ones(3)
    assert RingShift(x, Axis("one")).arrived() is x
