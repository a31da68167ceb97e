"""Two grids over the same ranks."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.layout.fold import Grid, fold_into_grids


def test_the_example_of_256_ranks_gives_its_sizes():
    dense, expert = fold_into_grids(256, ParallelConfig(tp=4, cp=2, pp=4, etp=1, ep=64))
    assert dense.sizes == {"pp": 4, "dp": 8, "cp": 2, "tp": 4}
    assert expert.sizes == {"pp": 4, "edp": 1, "ep": 64, "etp": 1}


def test_the_drawing_in_the_docstring_is_what_fold_does():
    dense, expert = fold_into_grids(8, ParallelConfig(tp=2, ep=4))
    assert [dense.coordinates_of_rank(rank)["dp"] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [dense.coordinates_of_rank(rank)["tp"] for rank in range(8)] == [0, 1] * 4
    assert [expert.coordinates_of_rank(rank)["edp"] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [expert.coordinates_of_rank(rank)["ep"] for rank in range(8)] == [0, 1, 2, 3] * 2
    assert dense.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert dense.groups("dp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert expert.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, ParallelConfig]:
    """A power of two of ranks and degrees that divide it."""
    power = draw(st.integers(0, 8))
    pp = draw(st.integers(0, power))
    left = {"dense": power - pp, "expert": power - pp}
    degrees: dict[str, int] = {}
    for name, grid in (("tp", "dense"), ("cp", "dense"), ("ep", "expert"), ("etp", "expert")):
        taken = draw(st.integers(0, left[grid]))
        left[grid] -= taken
        degrees[name] = 2**taken
    return 2**power, ParallelConfig(pp=2**pp, **degrees)


@settings(deadline=None)
@given(worlds())
def test_every_set_of_axes_partitions_the_ranks_of_either_grid(case: tuple[int, ParallelConfig]):
    world, parallel = case
    for grid in fold_into_grids(world, parallel):
        assert grid.world == world
        names = list(grid.sizes)
        for axes in [(), *((name,) for name in names), tuple(names[1:]), tuple(names)]:
            groups = grid.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            assert {len(group) for group in groups} == {prod(grid.sizes[a] for a in axes)}
            assert all(list(group) == sorted(group) for group in groups)


@settings(deadline=None)
@given(worlds())
def test_both_grids_share_the_pipeline_stages(case: tuple[int, ParallelConfig]):
    dense, expert = fold_into_grids(*case)
    assert dense.groups("dp", "cp", "tp") == expert.groups("edp", "ep", "etp")
    assert dense.groups("pp") == expert.groups("pp")
    for rank in range(case[0]):
        assert dense.coordinates_of_rank(rank)["pp"] == expert.coordinates_of_rank(rank)["pp"]


@settings(deadline=None)
@given(worlds())
def test_a_rank_is_known_by_its_coordinate(case: tuple[int, ParallelConfig]):
    for grid in fold_into_grids(*case):
        places = [tuple(grid.coordinates_of_rank(rank)[name] for name in grid.sizes) for rank in range(case[0])]
        assert places == sorted(set(places)), "coordinates are distinct and in the order of the ranks, outermost first"
        assert all(0 <= at < size for place in places for at, size in zip(place, grid.sizes.values(), strict=True))


@settings(deadline=None)
@given(worlds())
def test_two_ranks_share_a_group_exactly_when_they_differ_only_along_its_axes(case: tuple[int, ParallelConfig]):
    dense, _ = fold_into_grids(*case)
    for group in dense.groups("dp", "tp"):
        at = [dense.coordinates_of_rank(rank) for rank in group]
        assert len({(place["pp"], place["cp"]) for place in at}) == 1


@pytest.mark.parametrize(("world", "degrees", "part"), [(8, {"tp": 3}, "tp x cp x pp = 3"), (8, {"ep": 16}, "16")])
def test_degrees_that_do_not_divide_the_ranks_are_refused(world: int, degrees: dict[str, int], part: str):
    with pytest.raises(UserError, match=f"{part} does not divide the number of ranks, {world}"):
        fold_into_grids(world, ParallelConfig(**degrees))


def test_an_unknown_axis_is_told_with_those_there_are():
    with pytest.raises(ValueError, match=r"no axis \['ep'\].*'dp', 'tp'"):
        Grid({"dp": 2, "tp": 2}).groups("ep")
