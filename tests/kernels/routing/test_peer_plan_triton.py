"""The Triton kernels of the plan of all ranks, run by Triton's interpreter where there is no GPU: one process plays all
ranks, with their rooms side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.registry import CaseInputs
from moefold.kernels.routing import peer_plan_triton
from moefold.kernels.routing.arrivals import ArrangedArrivals
from moefold.kernels.routing.peer_plan import (
    AnnouncedCase,
    announce_all,
    announced_cases,
    arrange_arrivals,
    arrival_shapes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENDERS = {1: [1], 2: [0, 3]}  # whose maps are made, by etp
LEFT = 2**29  # by a rank that is lost


def both_cases() -> Iterator[tuple[AnnouncedCase, AnnouncedCase]]:
    """The same case twice, with rooms of its own."""
    draw = CaseInputs(DEVICE, torch.float32)
    yield from zip(announced_cases(draw), announced_cases(draw), strict=True)


def flag() -> torch.Tensor:
    return torch.zeros((), dtype=torch.bool, device=DEVICE)


def test_all_rooms_get_the_choices_and_counts_of_the_reference():
    for mine, expected in both_cases():
        announce_all(expected)
        for sender, (ids, weights) in enumerate(mine.choices):
            numbers = (sender, sender - 1)
            peer_plan_triton.launch_announce_choices(ids, weights, mine.position_E, numbers, mine.rooms, None)
        for own, rooms in zip(mine.rooms, expected.rooms, strict=True):
            assert all(map(torch.equal, own, rooms)), mine.name


def test_maps_of_rows_and_the_flag_of_overflow_are_those_of_the_reference():
    overflows = set()
    for case, _ in both_cases():
        announce_all(case)
        for sender in SENDERS[case.etp]:
            for about, shape in arrival_shapes(case, sender, len(case.choices[sender][0])):
                own, expected = flag(), flag()
                rooms = case.rooms.of(sender)
                arranged = peer_plan_triton.launch_arrange_arrivals(rooms, shape, own, None)
                reference = ArrangedArrivals(*arrange_arrivals(*rooms, shape, expected))
                for name, mine, plain in zip(ArrangedArrivals._fields, arranged, reference, strict=True):
                    assert torch.equal(mine, plain), f"{case.name}, rank {sender}, {about}: {name}"
                assert bool(own) == bool(expected)
                overflows.add((about, bool(own)))
    assert ("few fit", True) in overflows
    assert ("all fit", True) not in overflows


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_nothing_arrives_of_what_a_lost_rank_left(implementation: str):
    case = next(announced_cases(CaseInputs(DEVICE, torch.float32)))
    for rooms in (case.rooms.positions, case.rooms.counts):
        for room in rooms:
            room.fill_(LEFT)
    (_, shape), *_ = arrival_shapes(case, 0, 3)
    lost = torch.ones(1, dtype=torch.int64, device=DEVICE)
    arrange = arrange_arrivals.implementations[implementation]
    arranged = ArrangedArrivals(*arrange(*case.rooms.of(0), shape, flag(), lost))
    for field in ("index_R", "slots_NK", "slots_Ts", "room_s"):
        assert (getattr(arranged, field) == -1).all(), field
    assert arranged.ends_e.tolist() == [0, 0]
