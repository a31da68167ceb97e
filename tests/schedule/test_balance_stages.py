"""Automatic cuts: exact, and at least as balanced as what people published."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.schedule.balance_stages import model_pieces, propose_layout
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import StageLayout, parse_layout, stage_layout_problems


def stage_costs(layout: StageLayout, costs: list[float]) -> list[float]:
    each = iter(costs)
    return [sum(next(each) for _ in pieces) for pieces in layout.stages]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_faster_slowest_stage_or_then_a_smaller_sum_of_squares(costs: list[int], data: st.DataObject):
    stages = data.draw(st.integers(1, len(costs)))
    bounds = ([0, *cut, len(costs)] for cut in combinations(range(1, len(costs)), stages - 1))
    every = [[sum(costs[a:b]) for a, b in pairwise(cut)] for cut in bounds]
    found = stage_costs(propose_layout("t" * len(costs), costs, stages), [float(c) for c in costs])
    assert (max(found), sum(s * s for s in found)) == min((max(s), sum(x * x for x in s)) for s in every)


# Forward seconds relative to an MoE layer: embeddings are cheap, MTP is a layer with a head, the head is not free
PRICES = {
    "as Table 10 argues": {"E": 0.05, "d": 2 / 3, "t": 1.0, "m": 1.5, "L": 0.5},
    "heavy head": {"E": 0.1, "d": 0.8, "t": 1.0, "m": 2.2, "L": 1.2},
    "light dense layers": {"E": 0.0, "d": 0.4, "t": 1.0, "m": 1.2, "L": 0.2},
}


@pytest.mark.parametrize("name", PRICES)
@pytest.mark.parametrize("text", ["Ed*3|(tt|)*29m|L", "Ed*3|(t*4|)*14ttmL", "Ed*3t|(t*4|)*14tmL"])
def test_61_layers_and_mtp_are_at_least_as_balanced_as_in_published_layouts(name: str, text: str):
    published, pieces = parse_layout(text), model_pieces(61, 3, 1)
    costs = [PRICES[name][piece] for piece in pieces]
    found = propose_layout(pieces, costs, len(published.stages))
    assert stage_layout_problems(found, len(published.stages), layers=61, dense_layers=3, mtp_layers=1) == []
    ours, theirs = stage_costs(found, costs), stage_costs(published, costs)
    assert max(ours) <= max(theirs) + 1e-12
    assert sum(s * s for s in ours) <= sum(s * s for s in theirs) + 1e-9 or max(ours) < max(theirs) - 1e-12


def test_pieces_come_in_the_models_order():
    assert model_pieces(4, 1, 1) == "EdtttmL"
    assert propose_layout(model_pieces(2), [1.0] * 4, 4).stages == ("E", "t", "t", "L")


def test_more_stages_than_pieces_are_told():
    with pytest.raises(ScheduleError, match="5 stages, but the model has only 4 pieces; lower pp or vpp"):
        propose_layout(model_pieces(2), [1.0] * 4, 5)
