"""Along each axis of its grid a parameter is either cut or replicated; only where replicated is its gradient summed."""

from itertools import combinations

import pytest

from moefold.layout.axes import COMBINATIONS
from moefold.layout.placement import EXPERTS, GRIDS, REPLICATED, Placement

EVERY = [
    Placement(grid, tuple(enumerate(axes)))  # pyright: ignore[reportArgumentType]
    for grid, names in GRIDS.items()
    for size in range(len(names) + 1)
    for axes in combinations(names, size)
]


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_cut_and_summed_axes_together_are_the_grid_without_overlap(placement: Placement):
    assert not set(placement.cut_axes) & set(placement.summed_axes)
    assert {*placement.cut_axes, *placement.summed_axes} == set(GRIDS[placement.grid])


def test_a_replicated_parameter_is_summed_over_its_whole_grid():
    assert REPLICATED.cut_axes == ()
    assert REPLICATED.summed_axes == ("dp", "cp", "tp")


def test_experts_are_cut_by_ep_on_their_first_dim_and_summed_over_the_rest():
    assert EXPERTS.cut == ((0, "ep"),)
    assert EXPERTS.summed_axes == ("edp", "etp")


@pytest.mark.parametrize("placement", [REPLICATED, EXPERTS], ids=["replicated", "experts"])
def test_there_is_a_group_for_the_sum_of_every_placement_in_use(placement: Placement):
    assert placement.summed_axes in COMBINATIONS
