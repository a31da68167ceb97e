"""Along each axis of its grid a parameter is either cut or replicated; only where replicated is its gradient summed."""

from itertools import combinations

import pytest

from moefold.layout.axes import AXIS_COMBINATIONS, GRADIENT_AXES
from moefold.layout.placement import GRID_AXES, REPLICATED, Placement, sharded_over_experts, sharded_over_tp

EVERY = [
    Placement(grid, tuple(enumerate(axes)))  # pyright: ignore[reportArgumentType]
    for grid, names in GRID_AXES.items()
    for size in range(len(names) + 1)
    for axes in combinations(names, size)
]


@pytest.mark.parametrize("placement", EVERY, ids=str)
def test_cut_and_summed_axes_together_are_the_grid_without_overlap(placement: Placement):
    assert not set(placement.sharded_axes) & set(placement.gradient_sum_axes)
    assert {*placement.sharded_axes, *placement.gradient_sum_axes} == set(GRID_AXES[placement.grid])


def test_a_replicated_parameter_is_summed_over_its_whole_grid():
    assert REPLICATED.sharded_axes == ()
    assert REPLICATED.gradient_sum_axes == ("dp", "cp", "tp")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_dense_parameter_cut_over_tp_is_summed_over_the_rest(dim: int):
    assert sharded_over_tp(dim).cut == ((dim, "tp"),)
    assert sharded_over_tp(dim).gradient_sum_axes == ("dp", "cp")


def test_experts_are_cut_by_ep_on_their_first_dim_and_by_etp_inside_and_summed_over_the_rest():
    assert sharded_over_experts(2).cut == ((0, "ep"), (2, "etp"))
    assert sharded_over_experts(2).gradient_sum_axes == ("edp",)


IN_USE = {"replicated": REPLICATED, "over tp": sharded_over_tp(0), "experts": sharded_over_experts(2)}


@pytest.mark.parametrize("name", IN_USE)
def test_there_is_a_group_for_the_sum_of_every_placement_in_use(name: str):
    assert IN_USE[name].gradient_sum_axes in AXIS_COMBINATIONS
    assert IN_USE[name].gradient_sum_axes in GRADIENT_AXES, "and one that backward's own collectives do not use"
