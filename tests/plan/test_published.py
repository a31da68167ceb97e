"""Throughput that others measured, foretold without the row in question."""

from statistics import mean, median

import pytest

from tests.support.published import errors, factor, judged, pairs, quantile, right

pytestmark = pytest.mark.slow


def test_rows_are_foretold_when_held_out():
    out = [abs(error) for error in errors(judged())]
    assert len(out) > 150
    assert median(out) <= 0.12
    assert quantile(out, 0.9) <= 0.30


def test_rows_are_foretold_by_the_physics_alone():
    """No factor of any software stack: what a user of the planner sees."""
    by_itself = [abs(each.predicted / each.measured - 1) for each in judged()]
    assert median(by_itself) <= 0.12


def test_of_two_layouts_the_faster_is_known():
    found = [right(a, b) for a, b in pairs(judged())]
    assert len(found) > 80
    assert mean(found) >= 0.85


def test_a_factor_never_sees_the_configuration_it_is_for():
    every = judged()
    one = next(each for each in every if each.row["id"] == "mb-26.06-39")
    without = tuple(each for each in every if each.configuration != one.configuration)
    assert factor(one, every) == pytest.approx(factor(one, without))
