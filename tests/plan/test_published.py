"""Throughput that others measured, foretold without the row in question."""

from statistics import mean, median

import pytest

from moefold.plan.error_band import read_bands
from tests.support.published import (
    bands,
    errors,
    factor,
    judged,
    judged_dense,
    left_out,
    pairs,
    quantile,
    right,
)
from tests.support.published_rows import rows

pytestmark = pytest.mark.slow


@pytest.mark.extended
def test_rows_are_foretold_when_held_out():
    out = [abs(error) for error in errors(judged())]
    assert len(out) >= 250
    assert median(out) <= 0.12
    assert quantile(out, 0.9) <= 0.30


def test_rows_are_foretold_by_the_physics_alone():
    """No factor of any software stack: what a user of the planner sees."""
    assert median(abs(each.error) for each in judged()) <= 0.12


def test_dense_models_are_foretold_too():
    assert len(judged_dense()) == 80
    assert median(abs(each.error) for each in judged_dense()) <= 0.12


def test_every_row_is_judged_or_left_out_for_a_reason_that_is_told():
    """Other kinds of layers, a layout or a speed that the source does not state; never the GPU or a known model."""
    reasons = left_out()
    assert len(judged()) + len(judged_dense()) + len(reasons) == len(rows())
    unknown = [reason for reason in reasons.values() if "neither the planner nor the trainer" in reason]
    assert len(unknown) == 60
    assert len(reasons) - len(unknown) == 11
    assert not [reason for reason in reasons.values() if "GPU file" in reason]


def test_tables_of_every_source_are_judged():
    """Models and cards that only one source has measured."""
    found = [(each.row["model"], each.row["gpu"]) for each in judged()]
    assert found.count(("Internal-352B", "H800")) == 13
    assert found.count(("Mixtral-8x22B-G8T8", "H100")) == 13
    assert len([card for _, card in found if card in ("B200", "B300")]) == 30


def test_the_planner_states_the_bands_that_the_judge_finds():
    """If this fails after a change of the planner: python -m tests.support.published --write"""
    stated = read_bands()
    for band in bands():
        told = stated[band.gpu, band.family]
        assert told.runs == band.runs, band
        for name in ("low", "middle", "high"):
            assert getattr(told, name) == pytest.approx(getattr(band, name), abs=0.02), (band, name)
    assert len(stated) == len(bands())


def test_of_two_layouts_the_faster_is_known():
    found = [right(a, b) for a, b in pairs(judged())]
    assert len(found) > 300
    assert mean(found) >= 0.85


def test_a_factor_never_sees_the_configuration_it_is_for():
    every = judged()
    one = next(each for each in every if each.row["id"] == "mb-26.06-39")
    without = tuple(each for each in every if each.configuration != one.configuration)
    assert factor(one, every) == pytest.approx(factor(one, without))
