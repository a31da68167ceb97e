"""Costs as people write them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from moefold.schedule import stage_costs as module
from moefold.schedule.program import PipelineOp
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_costs import read_stage_costs, uniform_costs
from moefold.schedule.stage_layout import parse_layout


def test_nothing_given_is_one_for_a_ranks_share_split_over_its_chunks():
    assert read_stage_costs({}, 8, 2) == uniform_costs(8, 2)
    assert read_stage_costs({"F": 1, "D": 1, "W": 1}, 8, 2) == uniform_costs(8, 2)
    assert uniform_costs(8, 2).compute_seconds(PipelineOp("D", 5, 0)) == 0.5


def test_a_list_is_by_stage_and_a_mapping_by_piece():
    found = read_stage_costs({"F": [1, 2, 3, 4], "D": {"t": 2, "L": 0.5}}, 4, 2, parse_layout("Et|tt|t|L"))
    assert list(found.compute["F"]) == [1, 2, 3, 4]
    assert list(found.compute["D"]) == [2, 4, 2, 0.5]


def test_the_documented_example_reads():
    docs = Path(__file__).parents[2] / "docs" / "schedules.md"
    example = docs.read_text().split("```yaml\n")[1].split("```")[0]
    for text in ((module.__doc__ or "").split("\n\n")[1], example):
        found = read_stage_costs(yaml.safe_load(text), 4, 1, parse_layout("Ed|tt|tt|mL"))
        assert list(found.compute["W"]) == pytest.approx([0.7, 2, 2, 2.1])
        assert list(found.held) == [0.5e9] * 4
        assert found.comm_seconds(PipelineOp("F", 2, 0)) == 0.4
        assert found.send == 0.05


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"B": 1}, 'no cost "B"'),
        ({"comn": {"F": 1}}, 'no cost "comn" (did you mean "comm"?); there are: F, D, W, comm, send, bytes'),
        ({"comm": {"f": 1}}, 'no cost "comm.f"'),
        ({"comm": 3}, "comm = 3; expected a mapping, such as {F: 0.5}"),
        ({"F": -1}, "F = -1 is not legal; expected a number at least 0"),
        ({"F": "fast"}, "F = fast is not legal"),
        ({"F": True}, "F = True is not legal"),
        ({"F": None}, "F = None is not legal"),
        ({"F": float("nan")}, "F = nan is not legal"),
        ({"send": "1e999"}, "send = 1e999 is not legal"),
        ({"D": [1, 2]}, "D has 2 numbers; expected 4, one for each of the pp x vpp stages"),
        ({"D": [1, 2, 3, "x"]}, "D[3] = x is not legal"),
        ({"W": {"t": 1}}, "W is given by piece, but there is no layout"),
        ({"bytes": {"saved": 1, "held": 2}}, "bytes.held is 2 on stage 0, more than bytes.saved, 1"),
    ],
)
def test_a_bad_cost_is_told_by_name_with_what_was_expected(tree: dict[str, Any], says: str):
    with pytest.raises(ScheduleError) as told:
        read_stage_costs(tree, 4, 1)
    assert says in str(told.value)


def test_all_bad_costs_are_told_at_once():
    with pytest.raises(ScheduleError) as told:
        read_stage_costs({"F": -1, "D": "x", "nothing": 1, "send": -2}, 4, 1)
    assert len(told.value.problems) == 4
