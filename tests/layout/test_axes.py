"""Groups of ranks on real processes."""

import pytest
import torch
import torch.distributed as dist

from moefold.comm.collectives import all_gather_no_grad, all_reduce_no_grad
from moefold.layout.axes import AXIS_COMBINATIONS, World
from tests.support.ranks import run_ranks


def name_everything(world: World) -> dict[str, tuple[int, ...]]:
    own = torch.tensor([world.rank])
    met = {names: all_gather_no_grad(own, world.axis(*names)) for names in AXIS_COMBINATIONS}
    return {"_".join(names): tuple(ranks.tolist()) for names, ranks in met.items()}


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"tp": 2, "cp": 2}, {"ep": 4}, {"pp": 2, "tp": 2, "ep": 2}])
def test_every_axis_joins_exactly_the_ranks_its_grid_says(parallel: dict[str, int]):
    met = run_ranks(name_everything, 4, **parallel)
    for rank, groups in enumerate(met):
        for axis, ranks in groups.items():
            assert rank in ranks, f"rank {rank} is not in its own {axis} group {ranks}"
            assert all(met[other][axis] == ranks for other in ranks), f"ranks {ranks} disagree about {axis}"
    assert met[0]["dp_cp_tp"] == met[0]["edp_ep_etp"], "both grids cover the same ranks of a stage"


def count_new_groups(world: World) -> int:
    return len(dist.distributed_c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]


def test_a_rank_makes_its_own_groups_and_no_others():
    """Before, every rank made every group of every partition: 2,028 of them in a world of 1,024."""
    assert len(set(run_ranks(count_new_groups, 4, pp=2, tp=2))) == 1
    assert run_ranks(count_new_groups, 8, tp=2)[0] == run_ranks(count_new_groups, 4, tp=2)[0]


def add_ranks(world: World) -> float:
    return all_reduce_no_grad(torch.tensor([float(world.rank)]), world.everyone).item()


def test_sum_is_the_same_on_every_rank_and_the_identity_on_one():
    assert run_ranks(add_ranks, 4) == [6.0] * 4
    assert run_ranks(add_ranks, 1) == [0.0]


def fail_on_two(world: World) -> None:
    if world.rank == 2:
        raise ValueError("planted")
    all_reduce_no_grad(torch.zeros(1), world.everyone)


def test_a_failing_rank_is_named():
    with pytest.raises(AssertionError, match=r"rank \d of 3 failed"):
        run_ranks(fail_on_two, 3)
