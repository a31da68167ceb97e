"""Along each axis of its grid a parameter is either cut or replicated; only where replicated is its gradient summed."""

from itertools import combinations

import pytest

from moefold.layout.axes import COMBINATIONS, GRADIENT_AXES
from moefold.layout.placement import GRIDS, REPLICATED, Placement, over_experts, over_tp

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


@pytest.mark.parametrize("dim", [0, 1])
def test_a_dense_parameter_cut_over_tp_is_summed_over_the_rest(dim: int):
    assert over_tp(dim).cut == ((dim, "tp"),)
    assert over_tp(dim).summed_axes == ("dp", "cp")


def test_experts_are_cut_by_ep_on_their_first_dim_and_by_etp_inside_and_summed_over_the_rest():
    assert over_experts(2).cut == ((0, "ep"), (2, "etp"))
    assert over_experts(2).summed_axes == ("edp",)


IN_USE = {"replicated": REPLICATED, "over tp": over_tp(0), "experts": over_experts(2)}


@pytest.mark.parametrize("name", IN_USE)
def test_there_is_a_group_for_the_sum_of_every_placement_in_use(name: str):
    assert IN_USE[name].summed_axes in COMBINATIONS
    assert IN_USE[name].summed_axes in GRADIENT_AXES, "and one that backward's own collectives do not use"
