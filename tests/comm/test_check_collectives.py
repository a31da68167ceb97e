"""In debug mode a collective that ranks disagree on is named within seconds, with both places."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.comm.check_collectives import checked_collectives
from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad, all_to_all_no_grad
from moefold.comm.host_objects import broadcast_object
from moefold.config.errors import RunFailure
from moefold.layout.axes import World
from tests.support.machine_speed import slowness
from tests.support.ranks import run_ranks


def another_shape(world: World) -> None:
    all_reduce_no_grad(torch.zeros(2 + world.rank), world.everyone)


def another_type(world: World) -> None:
    all_reduce_no_grad(torch.zeros(2, dtype=torch.float64 if world.rank else torch.float32), world.everyone)


def another_collective(world: World) -> None:
    if world.rank:
        all_reduce_no_grad(torch.zeros(2), world.everyone)
    else:
        all_reduce_max_no_grad(torch.zeros(2), world.everyone)


def nobody_comes(world: World) -> None:
    if world.rank == 0:
        all_reduce_no_grad(torch.zeros(2), world.everyone)


def another_count(world: World) -> None:
    all_to_all_no_grad(torch.zeros(4, 3), [2, 2], [1, 2] if world.rank else [2, 2], world.everyone)


def agreement(world: World) -> None:
    for _ in range(3):
        all_reduce_no_grad(torch.zeros(2), world.everyone)


def told(world: World, path: str, work) -> tuple[str, float]:
    broadcast_object(None, world.everyone)  # all groups are there before anybody leaves
    begun = time.monotonic()
    with checked_collectives(dist.FileStore(path, world.size), world.rank, patience=2.0):
        try:
            work(world)
        except RunFailure as failed:
            return str(failed), time.monotonic() - begun
        except RuntimeError:
            return "the other rank left", time.monotonic() - begun
    return "", time.monotonic() - begun


@pytest.mark.alone
@pytest.mark.parametrize(
    ("work", "says"),
    [
        (another_shape, ["rank 0 does sum of {'shape': [2]", "rank 1 does sum of {'shape': [3]"]),
        (another_type, ["float32", "float64"]),
        (another_collective, ["rank 0 does max", "rank 1 does sum"]),
        (nobody_comes, ["rank 0 waits in sum", "rank 1 did not come within 2 s", "no collective yet"]),
        (another_count, ["sends 2 rows to rank 1", "expects 1"]),
    ],
)
def test_a_disagreement_is_named_with_both_places_within_seconds(work, says: list[str], tmp_path: Path):
    begun = time.monotonic()
    (text, seconds), *_ = run_ranks(told, 2, str(tmp_path / "store"), work)
    assert time.monotonic() - begun < 60, "nobody is left waiting"
    for part in [*says, "test_check_collectives.py:"]:
        assert part in text, text
    assert seconds < 3 + 2 * slowness(), "three seconds are waits"


def test_ranks_that_agree_notice_nothing(tmp_path: Path):
    assert [text for text, _ in run_ranks(told, 2, str(tmp_path / "store"), agreement)] == ["", ""]
