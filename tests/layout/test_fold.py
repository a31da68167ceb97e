"""Two grids over the same ranks."""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.layout.fold import Digit, Grid, fold_into_grids, group_of_rank, split_by_node, split_outermost


def groups(grid: Grid, *axes: str) -> list[tuple[int, ...]]:
    """All groups of a partition, from the group that each rank finds for itself."""
    partition = grid.partition(*axes)
    return list(dict.fromkeys(tuple(group_of_rank(partition, rank)) for rank in range(grid.world)))


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
    assert groups(dense, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(dense, "dp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups(expert, "edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


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
            found = groups(grid, *axes)
            assert sorted(rank for group in found for rank in group) == list(range(world))
            assert {len(group) for group in found} == {prod(grid.sizes[a] for a in axes)}
            assert all(list(group) == sorted(group) for group in found)


@settings(deadline=None)
@given(worlds())
def test_both_grids_share_the_pipeline_stages(case: tuple[int, ParallelConfig]):
    dense, expert = fold_into_grids(*case)
    assert groups(dense, "dp", "cp", "tp") == groups(expert, "edp", "ep", "etp")
    assert groups(dense, "pp") == groups(expert, "pp")
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
    for group in groups(dense, "dp", "tp"):
        at = [dense.coordinates_of_rank(rank) for rank in group]
        assert len({(place["pp"], place["cp"]) for place in at}) == 1


@pytest.mark.parametrize(("world", "degrees", "part"), [(8, {"tp": 3}, "tp x cp x pp = 3"), (8, {"ep": 16}, "16")])
def test_degrees_that_do_not_divide_the_ranks_are_refused(world: int, degrees: dict[str, int], part: str):
    with pytest.raises(UserError, match=f"{part} does not divide the number of ranks, {world}"):
        fold_into_grids(world, ParallelConfig(**degrees))


def test_an_unknown_axis_is_told_with_those_there_are():
    with pytest.raises(ValueError, match=r"no axis \['ep'\].*'dp', 'tp'"):
        Grid({"dp": 2, "tp": 2}).partition("ep")


@settings(deadline=None)
@given(worlds())
def test_equal_partitions_compare_equal_and_unequal_ones_do_not(case: tuple[int, ParallelConfig]):
    grids = fold_into_grids(*case)
    axes = [(), ("pp",), ("dp",), ("tp",), ("dp", "cp"), ("dp", "tp"), ("edp", "etp"), ("ep",), ("ep", "etp")]
    of_both = [(grid, names) for grid in grids for names in axes if set(names) <= set(grid.sizes)]
    found = [(grid.partition(*names), groups(grid, *names)) for grid, names in of_both]
    for (a, a_groups), (b, b_groups) in product(found, found):
        assert (a == b) == (a_groups == b_groups)


@pytest.mark.parametrize(
    ("axis", "node_size", "inside", "across"),
    [
        ((1, 16), 8, [(1, 8)], [(8, 2)]),
        ((2, 16), 8, [(2, 4)], [(8, 4)]),
        ((1, 8), 8, [(1, 8)], []),
        ((1, 4), 8, [(1, 4)], []),
        ((8, 4), 8, [], [(8, 4)]),
        ((16, 4), 8, [], [(16, 4)]),
        ((1, 4), 6, [(1, 4)], []),  # node borders cut some groups and not others
        ((1, 4), 1, [], [(1, 4)]),
    ],
)
def test_nodes_cut_the_groups_of_an_axis(
    axis: tuple[int, int], node_size: int, inside: list[tuple[int, int]], across: list[tuple[int, int]]
):
    assert split_by_node((Digit(*axis),), node_size) == (tuple(inside), tuple(across))
    assert split_by_node((), node_size) == ((), ())


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("partition", [(), (Digit(1, 8),), (Digit(2, 4),), (Digit(4, 2), Digit(1, 2)), (Digit(1, 6),)])
def test_copies_cut_groups_into_equal_parts_of_neighbours(partition: tuple[Digit, ...], copies: int):
    inside, across = split_outermost(partition, copies)
    for rank in range(16):
        whole = group_of_rank(partition, rank)
        part, same_place = group_of_rank(inside, rank), group_of_rank(across, rank)
        assert len(part) * len(same_place) == len(whole)
        assert copies % len(same_place) == 0
        assert {member for each in same_place for member in group_of_rank(inside, each)} == set(whole)
        begin = list(whole).index(part[0])
        assert list(whole)[begin : begin + len(part)] == list(part)
